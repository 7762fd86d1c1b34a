"""Terminal, files, memory and plugins of one process."""
