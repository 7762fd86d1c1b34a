"""Reinforcement learning from the rewards of generated completions (`--rlhf_type grpo`)."""
