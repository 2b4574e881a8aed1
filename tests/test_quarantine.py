"""A snapshot that must not be used: kept aside, left out of the round, and told to everybody whom it concerns."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable

import pytest
from processes import Peers

from crad_p2p.errors import ExitCode
from crad_p2p.manifest import Manifest


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("misname", "snapshot has an unexpected tensor 'weirdly'; its architecture has 1 tensors"),  # by its header
        ("poison", "tensor 'weights' holds values that are not finite"),  # by its values, which only a learner sees
    ],
)
def test_the_round_goes_on_without_it_and_its_owner_is_told(
    mesh: Callable[..., Peers], setting: str, reason: str
) -> None:
    peers = mesh(3, rounds=4)
    peers.tell(setting, 2, peer=2)
    running = peers.start_all()
    bad = running[2]
    for each in running[:2]:
        assert each.ended() == ExitCode.RESERVATIONS, each.output
        assert f"WARNING the snapshot of round 2 of peer 2 is not used: {reason}; it is kept in" in each.output
        assert "snapshots of peer 2 were refused" in each.last_words()
        assert [record.quarantined_teachers for record in each.history()] == [(), (), (2,), ()]
        assert [record.teachers[-1] for record in each.history()] == [2, 2, 1 - int(each.state.name[-1]), 2]
        assert each.history()[2].quarantine_reasons == {"2": reason}
        assert each.result().quarantine_reasons == {"2": reason}
        kept = each.state / "quarantine"
        manifest = Manifest.from_bytes((kept / "2.json").read_bytes())
        snapshot = (kept / "2.safetensors").read_bytes()
        assert manifest.round == 2
        assert hashlib.sha256(snapshot).hexdigest() == manifest.sha256
        assert (kept / "2.txt").read_text() == f"round 2: {reason}\n"
    assert bad.ended() == ExitCode.RESERVATIONS, bad.output
    for i in (0, 1):
        assert f"WARNING peer {i} does not use round 2 of this peer: {reason}" in bad.output
    assert re.search(r"peers 0, 1 do not use models of this peer \(round 2: ", bad.last_words())
    assert json.loads((bad.state / "refused-by.json").read_text()) == {"0": [2, reason], "1": [2, reason]}
