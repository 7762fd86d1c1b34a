"""Building a megatron-core model from a Hugging Face config."""
