"""report.html: a run as one page, made from the files of its folder. Imports no torch."""
