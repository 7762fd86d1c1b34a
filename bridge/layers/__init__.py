"""Modules for megatron-core's layer specs."""
