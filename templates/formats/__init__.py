"""Row formats of datasets."""
