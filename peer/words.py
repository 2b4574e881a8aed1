"""How sentences name peers."""

from __future__ import annotations

from collections.abc import Iterable


def name_peers(ids: Iterable[object]) -> str:
    """``peer 1`` or ``peers 1, 2``."""
    named = list(map(str, ids))
    return f"peer{'s' if len(named) > 1 else ''} {', '.join(named)}"
