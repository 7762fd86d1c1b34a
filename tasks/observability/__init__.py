"""What a user sees of a run: log, curves, throughput, FLOPs, profiles."""
