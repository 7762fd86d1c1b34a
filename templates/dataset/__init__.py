"""Datasets: files, sources, tokenization, the token store."""
