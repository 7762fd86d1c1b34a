"""Batches: order of samples, streaming, packing layout, data loaders."""
