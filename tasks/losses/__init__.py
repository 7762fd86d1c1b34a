"""Losses: pure functions of tensors, on any device. They keep one number a pair, a sample or a document; the step sums
them and divides by the global batch."""
