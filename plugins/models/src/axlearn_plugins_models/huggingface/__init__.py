"""Models in Hugging Face format, in and out of axlearn."""
