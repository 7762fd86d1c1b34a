"""Readers and writers of Hugging Face and megatron-core checkpoints."""
