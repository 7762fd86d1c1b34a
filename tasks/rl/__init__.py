"""Reinforcement learning from rewards of generated completions (`--rlhf_type grpo`)."""
