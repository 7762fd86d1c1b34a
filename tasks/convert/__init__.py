"""Conversion of checkpoints, and comparison of the result with the source."""
