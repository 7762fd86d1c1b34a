"""The trainer: setup, loop, step, optimizer, checkpoints."""
