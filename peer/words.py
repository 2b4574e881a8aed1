"""How sentences name peers and sizes, and what gRPC says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

from crad_p2p.foreign import printable

#: Peers that a sentence names.
MOST_NAMED = 12
#: Behind the peers in a sentence to which there is no connection now.
NOT_CONNECTED = "(not connected)"


def name_peers(ids: Iterable[object]) -> str:
    """``peer 1`` or ``peers 1, 2``; of many the first, since what a peer says of itself must fit into a message."""
    named = list(map(str, ids))
    more = len(named) - MOST_NAMED
    if more > 1:
        return f"peers {', '.join(named[:MOST_NAMED])} and {more} others"
    return f"peer{'s' if len(named) > 1 else ''} {', '.join(named)}"


def is_cut_off(explanation: str) -> bool:
    """Whether what a peer says that it waits for includes a peer that it does not reach."""
    return NOT_CONNECTED in explanation or "been reached since the start" in explanation


def in_short(details: str) -> str:
    """gRPC's words; of a connection that failed only the cause, which it says after all addresses and layers."""
    cause = details.rpartition(": ")[2] if "last error: " in details else details
    if "errors resolving" in cause:
        cause = f"the host name cannot be resolved: {cause.rpartition(': ')[2].rstrip(']')}"
    cause = re.sub(r"(^|: | \()OK\)?$", "", cause)  # so it calls why some connections have ended
    return printable(cause, 200)


def address_in(connection: str) -> str:
    """HOST:PORT of the other end of a connection, as gRPC names it: ``ipv4:10.0.0.7:41236``."""
    scheme, _, rest = connection.partition(":")
    return printable(unquote(rest) if scheme in ("ipv4", "ipv6") else connection, 100)


def in_bytes(number: float) -> str:
    """A number of bytes, rounded to what people compare: ``3.2 GB``."""
    for unit in ("kB", "MB", "GB", "TB"):
        number /= 1000
        if number < 999.5 or unit == "TB":
            break
    return f"{number:.1f} {unit}" if number < 9.95 else f"{number:.0f} {unit}"


def in_time(seconds: float) -> str:
    """A positive time, rounded to what people say: ``35 s``, ``5 min``, ``3 h``."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def in_days(days: float) -> str:
    """A positive number of days, rounded: ``1 day``."""
    if days < 0.95:
        return "less than a day"
    return "1 day" if days < 1.5 else f"{days:.0f} days"
