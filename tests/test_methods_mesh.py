"""Methods that publish, keep or run more than CRAD does, by real peers over gRPC: the bytes of the simulation."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from disks import RESTORED
from processes import Peers, assert_one_sentence

from crad_p2p.data.datasets import load_dataset
from crad_p2p.device import resolve_precision
from crad_p2p.errors import ExitCode
from crad_p2p.federation import load_federation
from crad_p2p.simulation import simulate

CPU = torch.device("cpu")
Make = Callable[..., Peers]
#: The two train in turn for both.
TOGETHER = {"name": "dfml", "dfml": {"mode": "aggregator", "period": 2}}
#: Images are made in round 1, put together in the next, and learned from in round 3; new ones in round 4.
FEDGD = {"name": "fedgd", "fedgd": {"first": 1, "every": 3, "images": 9, "steps": 1}}


@pytest.mark.parametrize(
    ("method", "killed"),
    [
        ({"name": "dfml", "dfml": {"period": 2}}, "before-announce@2"),  # after the peak, which must come back
        ({"name": "ce"}, None),
        ({"name": "fedmkd"}, None),
        ({"name": "fedmd"}, "before-announce@2"),  # the model, which nobody else has, must come back
        ({"name": "msfkd"}, None),
        (FEDGD, "before-announce@2"),  # with the images of all, which nobody keeps any more
        (TOGETHER, "before-announce@2"),  # which it has trained for both, and goes on from
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_over_the_network_as_in_memory(mesh: Make, method: dict[str, Any], killed: str | None) -> None:
    data = {"dataset": "digits", "samples": 200, "transfer_samples": 30}
    data = data if method["name"] in ("fedmd", "msfkd") else {**data, "transfer_samples": None}
    rounds = 4 if method in (FEDGD, TOGETHER) else 2
    peers = mesh(2, light=False, method=method, rounds=rounds, seed=5, data=data, training={"evaluate_every": 1})
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
        statistics = each.manifest(rounds).statistics
        assert (statistics.cross_entropy is not None) == (method["name"] == "ce")


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ({"name": "fedmd"}, "method fedmd does not publish models"),
        (FEDGD, "method fedgd does not publish models"),
        (TOGETHER, "by method dfml with mode aggregator no peer publishes its own model by itself"),
    ],
)
def test_a_model_that_nobody_else_has_is_not_replaced_by_another(mesh: Make, method: dict[str, Any], why: str) -> None:
    """A peer that has lost its disk can neither start from nothing nor recover, and says why."""
    data = {"dataset": "digits", "samples": 200, "transfer_samples": 30}
    rounds = 4 if method == FEDGD else 2
    peers = mesh(2, light=False, method=method, rounds=rounds, seed=5, data=data)
    started = [peers.start(0), peers.start(1)]
    for each in started:
        assert each.ended() == ExitCode.COMPLETE, each.output
    peers.start(0)  # serves again
    lost = peers.state(1)
    backup = shutil.copytree(lost, lost.with_name("backup"))
    shutil.rmtree(lost)
    refused = peers.start(1)
    here = "(there is no round here|the newest here is round 0)"
    sentence = (
        rf"peer 0 has had round {rounds} of this peer, and {here}: {RESTORED}\. Put back the newer directory, or start "
        rf"a new run: {why}, so nobody can give this peer's back"
    )
    code = refused.ended()
    assert_one_sentence(refused.output, code, ExitCode.INCOMPLETE, sentence)
    refused = peers.start(1, "--recover")
    sentence = (
        f"the model of round {rounds}, of which others have what was published, is not here, and {why}, so nobody can "
        "give it back: put back a copy of the state directory as it was after that round, or start a new run"
    )
    code = refused.ended()
    assert_one_sentence(refused.output, code, ExitCode.INCOMPLETE, sentence)
    assert not list(lost.glob(f"rounds/0*{rounds}"))
    shutil.rmtree(lost)
    shutil.copytree(backup, lost)
    back = peers.start(1, "--recover")  # and where nothing is lost it changes nothing
    back.says("nothing was lost")
    back.says("learner on cpu")
