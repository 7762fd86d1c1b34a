"""Images and videos of rows: sources, sizes, expansion into tokens, pixels, and positions."""
