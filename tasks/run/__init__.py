"""A run's folder, arguments and resume, and the context that tasks share."""
