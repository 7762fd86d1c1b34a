"""Observability of a run: log, curves, throughput, FLOPs, profiles."""
