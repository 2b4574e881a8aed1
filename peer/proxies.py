"""Proxy variables of the environment, which peers do not use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crad_p2p.federation import Federation, is_loopback
from peer.findings import Finding, ok, warning
from peer.words import name_peers

_WHAT = "proxies"
_NAMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


def check_proxies(environment: Mapping[str, str], unreached: Sequence[int]) -> Finding:
    """See whether somebody here may think that a proxy will do.

    Args:
        unreached: other peers on other machines that have not been reached directly (yet). Values of the variables are
            not shown: they may hold a password.
    """
    found = sorted(name for name, value in environment.items() if name.lower() in _NAMES and value)
    if not found:
        return ok(_WHAT, "no proxy variable is set")
    are = f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} set"
    if not unreached:
        return ok(_WHAT, f"{are}; peers do not use them, and need not")
    return warning(
        _WHAT,
        f"{are}, and peers do not use proxies",
        f"if this machine gets out through a proxy only, have a direct TCP route to {name_peers(unreached)} opened",
    )


def elsewhere(federation: Federation, own_id: int) -> tuple[int, ...]:
    """Other peers that are, by their addresses, on other machines."""
    return tuple(entry.id for entry in federation.peers if entry.id != own_id and not is_loopback(entry.address))
