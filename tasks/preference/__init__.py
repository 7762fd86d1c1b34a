"""Preference training: DPO, KTO, reward models."""
