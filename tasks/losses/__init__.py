"""Losses: pure functions of tensors, on any device.

They return a value per pair, sample or document. The step sums the values and divides by the global batch.
"""
