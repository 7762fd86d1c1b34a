"""Frozen models beside the trained one."""
