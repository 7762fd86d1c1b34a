"""Rules that score completions by the source of their row: mathematics, choices, instructions, programs, a judge."""
