"""Coordination of a run's ranks: collectives on Python objects, stop signals, a watchdog for hangs."""
