"""Reading and writing checkpoints: Hugging Face folders and megatron-core's format."""
