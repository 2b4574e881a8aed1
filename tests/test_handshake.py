"""Two real peers that do not run the same: both end, and say the same of it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from processes import Peers, doctored

from crad_p2p import __version__
from crad_p2p.errors import ExitCode
from peer.hello import PROTOCOL


@pytest.mark.parametrize(
    ("change", "field", "other", "own"),
    [
        ("import peer.hello; peer.hello.PROTOCOL = 77", "protocol version", "77", f"{PROTOCOL}"),
        ("import crad_p2p; crad_p2p.__version__ = '9.9.9'", "software version", "9.9.9", __version__),
    ],
    ids=["protocol", "software"],
)
def test_another_version_is_refused_on_both_sides(
    mesh: Callable[..., Peers], change: str, field: str, other: str, own: str
) -> None:
    peers = mesh(2, rounds=2)
    zero, one = peers.start(0), peers.start(1, command=doctored(f"{change}\nimport peer.cli; peer.cli.main()"))
    values = {0: own, 1: other}
    for i, each in enumerate((zero, one)):
        assert each.ended(30) == ExitCode.PEERS_DISAGREE, each.output
        assert re.fullmatch(
            rf"crad-peer: peers {i} and {1 - i} were started with different settings: the {field} is "
            rf"{re.escape(values[1 - i])} on peer {1 - i} and {re.escape(values[i])} on peer {i}; "
            r"give both the same federation file and software version",
            each.last_words(),
        ), each.output
        assert "Traceback" not in each.output
        assert each.last_round() <= 0  # nobody has learnt from anybody
