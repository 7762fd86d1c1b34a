"""Rollout: engines that generate completions during training, their servers, and the weight sync to them."""
