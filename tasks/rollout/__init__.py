"""Generating completions while training: engines in this process or behind a server, and weights into them."""
