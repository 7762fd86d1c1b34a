"""Mapping table from Hugging Face tensors to megatron-core parameters."""
