"""Numbers, causes and names as sentences say them."""

from __future__ import annotations

import pytest
from wire import PEER, federation

from peer.hello import describe_disagreement, greeting
from peer.words import in_days, in_short


@pytest.mark.parametrize(
    ("days", "words"),
    [(0.01, "less than a day"), (0.9999, "1 day"), (1.4, "1 day"), (1.6, "2 days"), (364.99, "365 days")],
)
def test_days(days: float, words: str) -> None:
    assert in_days(days) == words


@pytest.mark.parametrize(
    ("details", "cause"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:1: Connection refused",
            "Connection refused",
        ),
        ("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.7:1: OK", ""),
        (
            "errors resolving b.example:7400: [field:hostname lookup error:address lookup failed for b.example:7400: "
            "Domain name not found]",
            "the host name cannot be resolved: Domain name not found",
        ),
        ("OK", ""),
        ("Stream removed (OK)", "Stream removed"),
        ("Socket closed: OK", "Socket closed"),
        ("Stream removed (Socket closed)", "Stream removed (Socket closed)"),
        ("peer 1 does not keep round 3", "peer 1 does not keep round 3"),
    ],
)
def test_the_cause_in_what_grpc_says(details: str, cause: str) -> None:
    assert in_short(details) == cause


def test_two_processes_of_one_peer_are_told_apart() -> None:
    hello = greeting(federation(1, rounds=3000), PEER)
    assert describe_disagreement(hello, federation(1, rounds=12), PEER) == (
        "rounds is 3000 in the file of the other process of peer 1 and 12 in the file of this one"
    )
    assert describe_disagreement(hello, federation(1, rounds=12), 0) == (
        "rounds is 3000 in the file of peer 1 and 12 in the file of peer 0"
    )
