"""Rendering conversations by a tokenizer's chat template, and finding what to learn in them."""
