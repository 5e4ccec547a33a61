"""Llama, Gemma, Qwen, Mistral, DeepSeek, GPT-2 and ViT; Hugging Face directories in and out; layers of other libraries."""
