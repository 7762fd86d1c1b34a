"""LoRA adapters (https://arxiv.org/abs/2106.09685), whose tensors are entries of the mapping table."""
