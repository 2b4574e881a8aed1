"""What keeps a finished run from counting as complete, each by itself and together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crad_p2p.results import RoundRecord
from peer.reservations import reservations

GOOD = [RoundRecord(peer=0, round=number, snapshot_sha256="", validation_accuracy=None) for number in (1, 2, 3)]
NOTHING: dict[str, Any] = {"away": (), "behind": (), "refused": (), "conflicts": (), "refused_by": {}}


def test_none_for_a_run_as_it_should_be() -> None:
    assert reservations(GOOD, **NOTHING) == []
    assert reservations([replace(record, redone=2) for record in GOOD], **NOTHING) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"missing_teachers": (4,)}, "1 of 3 rounds were trained without the newest model of peer 4"),
        ({"stale_teachers": (2, 1)}, "1 of 3 rounds were trained without the newest model of peers 1, 2"),
        ({"quarantined_teachers": (3,)}, "snapshots of peer 3 were refused"),
        ({"skipped_rounds": (1,)}, "the mesh went on without this peer in 1 round, last in round 1"),
    ],
)
def test_what_a_round_lacked(changes: dict[str, Any], expected: str) -> None:
    assert reservations([GOOD[0], replace(GOOD[1], **changes), GOOD[2]], **NOTHING) == [expected]


def test_the_others_at_the_end() -> None:
    assert reservations(GOOD, **NOTHING | {"away": (5,), "behind": (5,)}) == [
        "peer 5 had not said that the last round is done there when this peer left"
    ]
    assert reservations(GOOD, **NOTHING | {"behind": (5, 6)}) == [
        "peers 5, 6 may still need this one (start the same command again to serve it)"
    ]


def test_evidence() -> None:
    found = reservations(GOOD, **NOTHING | {"conflicts": [Path("state/conflicts/peer-2-round-1.json")]})
    assert found == ["there is evidence that a peer published twice, in state/conflicts"]


def test_all_together_are_all_said() -> None:
    spoiled = [replace(record, missing_teachers=(1,), quarantined_teachers=(2,)) for record in GOOD]
    found = reservations(spoiled, away=(3,), behind=(4,), refused=(5,), conflicts=[Path("a/b")], refused_by={})
    assert len(found) == 5
    assert found[3] == "snapshots of peers 2, 5 were refused"
