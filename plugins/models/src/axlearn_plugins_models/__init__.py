"""Published models (Llama, Gemma, Qwen, ...), Hugging Face import and export, and layers from other libraries."""
