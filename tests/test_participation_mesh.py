"""Real peers of which some take part in a round: the bytes of the simulation, whoever is killed or away meanwhile."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable

import torch
from processes import Peer, Peers, until

from crad_p2p.data.datasets import load_dataset
from crad_p2p.device import resolve_precision
from crad_p2p.errors import ExitCode
from crad_p2p.federation import load_federation
from crad_p2p.simulation import simulate
from launch.checker import check
from peer.store import Store

CPU = torch.device("cpu")
Make = Callable[..., Peers]


def test_killed_in_the_middle_they_have_the_bytes_of_the_simulation(mesh: Make) -> None:
    peers = mesh(3, light=False, participation=2, rounds=4, seed=5)
    federation = load_federation(peers.file)
    assert [federation.active(number) for number in range(1, 5)] == [(0, 1), (1, 2), (1, 2), (0, 1)]
    dataset = load_dataset(federation.data, seed=federation.seed, data_dir=peers.folder)
    precision = resolve_precision("auto", CPU)
    summary, history = simulate(federation, dataset, device=CPU, precision=precision, threads=1)

    kill = {"CRAD_FAIL_POINT": "before-announce@2", "CRAD_FAIL_MARKER": str(peers.folder / "killed")}
    started = [peers.start(0), peers.start(1), peers.start(2, **kill)]
    assert started[2].ended() == -signal.SIGKILL
    started[2] = peers.start(2)
    for i, each in enumerate(started):
        assert each.ended() == ExitCode.COMPLETE, each.output
        own = [record for record in history if record.peer == i]
        found = [(record.round, record.snapshot_sha256) for record in each.history()]
        assert found == [(record.round, record.snapshot_sha256) for record in own]
        result, expected = each.result(), summary.peers[i]
        for field in ("rounds_completed", "snapshot_sha256", "best_round", "global_accuracy", "counts", "hits"):
            assert getattr(result, field) == getattr(expected, field), (i, field)
    assert check(federation, {i: Store(peers.state(i)) for i in range(3)}, history) == []


#: Rounds are those of peers 0 and 2 (1 to 3), 2 and 3, 0 and 3 (5 and 6), 2 and 3, 0 and 1, 1 and 3.
AWAY = {"participation": 2, "rounds": 9, "seed": 29}


def test_one_that_was_away_while_others_had_their_rounds_catches_up(mesh: Make) -> None:
    peers = mesh(4, **AWAY)
    peers.tell("hold", 1)
    started = peers.start_all()
    peers.connected(started)
    until(lambda: all(_has_manifests(each, 0) for each in started), "all initial manifests are everywhere")
    started[1].kill()
    peers.tell("hold", None)
    for i, number in ((0, 6), (2, 7), (3, 7)):  # the next round needs peer 1
        started[i].reach(number)
    until(lambda: started[3].has(2, 7), "the last model of peer 2 is where it was made")
    # Another one loses its disk: what it has published long ago is with the others alone.
    started[2].kill()
    shutil.rmtree(peers.state(2))
    started[1], started[2] = peers.start(1), peers.start(2, "--recover")
    for i, each in enumerate(started):
        assert each.ended() == ExitCode.COMPLETE, (i, each.output)
        assert (each.result().rounds_completed, each.result().best_round) == (9, 9)
    assert [record.round for record in started[1].history()] == [8, 9]
    assert [(each.peer, each.round) for each in started[1].manifest(8).consumed] == [(0, 6)]
    assert [record.round for record in started[2].history()] == [4, 7]
    assert {number for _, number in _received(peers, 1, "json")} == set(range(10))
    # Of models it has fetched what it learned from, and the last ones of those beside which it trained.
    assert _received(peers, 1, "safetensors") == {(0, 6), (3, 7), (0, 8), (3, 9)}

    # Started again, one that has seen the end needs nothing of the way there: nobody is left who has it.
    (peers.state(0) / "received/000008/1.json").unlink()
    again = peers.start(0)
    again.says("all have had what they need")
    again.kill()


def _received(peers: Peers, i: int, suffix: str) -> set[tuple[int, int]]:
    paths = peers.state(i).glob(f"received/*/*.{suffix}")
    return {(int(path.stem), int(path.parent.name)) for path in paths}


def _has_manifests(peer: Peer, number: int) -> bool:
    return len([*peer.state.glob(f"received/{number:06d}/*.json")]) == 3
