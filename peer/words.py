"""How sentences name peers, and what gRPC says."""

from __future__ import annotations

from collections.abc import Iterable

from crad_p2p.foreign import printable


def name_peers(ids: Iterable[object]) -> str:
    """``peer 1`` or ``peers 1, 2``."""
    named = list(map(str, ids))
    return f"peer{'s' if len(named) > 1 else ''} {', '.join(named)}"


def in_short(details: str) -> str:
    """gRPC's words; of a connection that failed only the cause, which it says after all addresses and layers."""
    return printable(details.rpartition(": ")[2] if "last error: " in details else details, 200)
