"""Methods that publish, keep or run more than CRAD does, by real peers over gRPC: the bytes of the simulation."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Peers

from crad_p2p.data.datasets import load_dataset
from crad_p2p.device import resolve_precision
from crad_p2p.errors import ExitCode
from crad_p2p.federation import load_federation
from crad_p2p.simulation import simulate

CPU = torch.device("cpu")
Make = Callable[..., Peers]


@pytest.mark.parametrize(
    ("method", "killed"),
    [
        ({"name": "dfml", "dfml": {"period": 2}}, "before-announce@2"),  # after the peak, which must come back
        ({"name": "ce"}, None),
        ({"name": "fedmkd"}, None),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_over_the_network_as_in_memory(mesh: Make, method: dict[str, Any], killed: str | None) -> None:
    peers = mesh(2, light=False, method=method, rounds=2, seed=5, training={"evaluate_every": 1})
    federation = load_federation(peers.file)
    dataset = load_dataset(federation.data, seed=federation.seed, data_dir=peers.folder)
    precision = resolve_precision("auto", CPU)
    summary, history = simulate(federation, dataset, device=CPU, precision=precision, threads=1)

    fails = {"CRAD_FAIL_POINT": killed, "CRAD_FAIL_MARKER": str(peers.folder / "killed")} if killed else {}
    started = [peers.start(0), peers.start(1, **fails)]
    if killed:
        assert started[1].ended() == -signal.SIGKILL
        started[1] = peers.start(1)
    for i, each in enumerate(started):
        assert each.ended() == ExitCode.COMPLETE, each.output
        own = [record for record in history if record.peer == i]
        for one, other in zip(each.history(), own, strict=True):
            for field in ("round", "snapshot_sha256", "train_loss", "target_top1", "peak_global_accuracy", "teachers"):
                assert getattr(one, field) == getattr(other, field), (i, one.round, field)
        result, expected = each.result(), summary.peers[i]
        for field in ("snapshot_sha256", "best_round", "local_accuracy", "peak_global_accuracy", "peak_local_accuracy"):
            assert getattr(result, field) == getattr(expected, field), (i, field)
        statistics = each.manifest(2).statistics
        assert (statistics.cross_entropy is not None) == (method["name"] == "ce")
