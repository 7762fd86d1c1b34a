"""Layers that megatron-core's specs are made of."""
