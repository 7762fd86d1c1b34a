"""Counts in messages."""

import re


def plural(count: int, noun: str) -> str:
    """Return the count with its noun: "1 row", "2 rows", "1,000 processes", "0 queries"."""
    if count != 1:
        if re.search(r"(s|x|ch|sh)$", noun):
            noun += "es"
        elif re.search(r"[^aeiou]y$", noun):
            noun = f"{noun[:-1]}ies"
        else:
            noun += "s"
    return f"{count:,} {noun}"
