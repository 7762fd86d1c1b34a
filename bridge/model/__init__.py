"""Builder of a megatron-core model from a Hugging Face config."""
