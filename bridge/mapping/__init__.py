"""The table that maps Hugging Face tensors to megatron-core parameters."""
