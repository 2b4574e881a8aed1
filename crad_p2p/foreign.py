"""Text and JSON that somebody else wrote."""

from __future__ import annotations

from typing import Any


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads``: a ValueError instead of a key that silently wins."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    return result


def printable(text: str, limit: int = 80) -> str:
    """Text fit for a log or an error: short, and without control characters."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return safe + ("…" if len(text) > limit else "")
