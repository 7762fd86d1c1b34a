"""Learning from preferences: DPO, KTO, reward models."""
