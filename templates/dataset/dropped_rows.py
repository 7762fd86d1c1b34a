"""Rows that were dropped, counted by reason."""

from dataclasses import dataclass, field

from ..formats.schemas import UnusableRow
from ..plural import plural


@dataclass
class DroppedRows:
    """Dropped rows by reason: their number, first locations, and minimum and maximum of tokens."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)  # of rows that are too long

    def add(self, reason: UnusableRow, location: str) -> None:
        text = str(reason)
        tokens = {} if reason.tokens is None else {text: [reason.tokens] * 2}
        self.merge(DroppedRows({text: 1}, {text: [location]}, tokens))

    def merge(self, other: "DroppedRows") -> None:
        for reason, number in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + number
            self.places[reason] = (self.places.get(reason, []) + other.places[reason])[:3]
        for reason, lengths in other.tokens.items():
            lengths = [*self.tokens.get(reason, []), *lengths]
            self.tokens[reason] = [min(lengths), max(lengths)]

    def __str__(self) -> str:
        lines = []
        for reason, number in sorted(self.counts.items(), key=lambda item: -item[1]):
            more = ", ..." if number > len(self.places[reason]) else ""
            description = f": {reason}"
            if reason in self.tokens:
                shortest, longest = self.tokens[reason]
                lengths = f"{longest:,}" if shortest == longest else f"shortest {shortest:,}, longest {longest:,}"
                description = f" {reason} ({lengths} tokens)"
            lines.append(f"  {plural(number, 'row')}{description} ({', '.join(self.places[reason])}{more})")
        return "\n".join(lines)
