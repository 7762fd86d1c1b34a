"""Ranks of a run: collectives on Python objects, stop signals, hangs."""
