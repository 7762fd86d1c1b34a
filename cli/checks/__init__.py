"""Checks of options against each other and the machine, before anything heavy is imported."""
