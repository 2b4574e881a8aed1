"""Ctrl-C and SIGTERM at any moment: within five seconds the process is gone, and has said how to continue."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import ENVIRONMENT, LIGHT, Peer, Peers, assert_one_sentence, doctored, has_ended, until, up, up_command

from crad_p2p.errors import ExitCode

SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: A peer from which no snapshot ever comes.
SILENT = """
import asyncio, peer.cli, peer.server
async def hang(*_):
    await asyncio.sleep(1000)
    yield
peer.server.PeerServicer.GetSnapshot = hang
peer.cli.main()
"""
#: A peer that reads a little of every snapshot, and never goes on.
SLUGGISH = """
import asyncio, logging, peer.cli, peer.link
from peer._proto.crad.v1 import peer_pb2
async def download(self, stub, manifest, partial, intake, recheck):
    request = peer_pb2.GetSnapshotRequest(peer=manifest.peer, round=manifest.round, sha256=manifest.sha256)
    call = stub.GetSnapshot(request)
    await call.read()
    logging.info("has read a little")
    await asyncio.sleep(1000)
peer.link.Link._download = download
peer.cli.main()
"""
#: A peer that never says that it has everything.
INSATIABLE = """
import peer.cli, peer.status
update = peer.status.Status.update
def forget(self, **fields):
    fields.pop("collected", None)
    update(self, **fields)
peer.status.Status.update = forget
peer.cli.main()
"""


def assert_leaves(peer: Peer, number: signal.Signals, sentence: str) -> None:
    """On a busy machine the five seconds are for the process, not for its scheduling: half of that again is allowed."""
    learner = peer.learner()
    seconds = peer.stop(number)
    print(f"{number.name}: {seconds:.2f} s")
    assert_one_sentence(peer.output, peer.process.returncode, ExitCode.INCOMPLETE, sentence)
    busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    assert seconds < (7.5 if busy else 5)
    assert not learner or has_ended(learner, peer.state)


# --- while the command starts -----------------------------------------------------------------------------------------


def test_the_console_scripts_are_those_that_are_ready_for_a_signal() -> None:
    tree = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert tree["project"]["scripts"] == {"crad-peer": "peer.__main__:main", "crad-mesh": "launch.__main__:main"}


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("peer", "peer.cli"),
        ("peer", "typer"),
        ("peer", "pydantic"),
        ("peer", "grpc"),
        ("peer", "peer.node"),
        ("launch", "launch.cli"),
        ("launch", "rich.console"),
        ("launch", "grpc"),
    ],
)
def test_during_the_imports(tmp_path: Path, package: str, module: str, number: signal.Signals) -> None:
    command = {"peer": "crad-peer", "launch": "crad-mesh"}[package]
    options = ["--id", "0", "--peers", "none.yaml"] if package == "peer" else ["up"]
    path = os.pathsep.join(filter(None, [str(LIGHT), ENVIRONMENT.get("PYTHONPATH", "")]))
    ended = subprocess.run(
        [sys.executable, "-P", "-m", package, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
        env={**ENVIRONMENT, "PYTHONPATH": path, "LIGHT_SIGNAL": f"{number.value}@{module}"},
    )
    assert (ended.stdout, ended.stderr) == (
        "",
        f"{command}: interrupted while it started; start the same command again to continue\n",
    )
    assert ended.returncode == ExitCode.INCOMPLETE


# --- while it runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_while_others_are_waited_for(mesh: Callable[..., Peers], number: signal.Signals) -> None:
    peers = mesh(3, rounds=5)
    waiting = peers.start(0)
    until(lambda: "waits for round 0 of peers 1 (not connected), 2" in waiting.explanation(), "it waits for the others")
    assert_leaves(
        waiting,
        number,
        rf"stopped by {number.name} before the end of its first round; start the same command again to.*",
    )


def test_in_training_and_while_a_learner_does_not_react(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=5)
    training, frozen = peers.run_to(3)
    until(lambda: training.explanation() == "round 4 is being trained", "it trains")
    os.kill(frozen.learner(), signal.SIGSTOP)
    assert_leaves(training, signal.SIGINT, "stopped by SIGINT after round 3 of 5; start the same command again to.*")
    assert_leaves(frozen, signal.SIGTERM, "stopped by SIGTERM after round 3 of 5; start the same command again to.*")
    peers.tell("hold", None)
    for each in peers.start_all():
        assert each.ended() == ExitCode.COMPLETE, each.output


def test_in_a_transfer_from_another(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=5)
    fetching, _ = peers.start(0), peers.start(1, command=doctored(SILENT))
    until(lambda: fetching.explanation() == "round 1 waits for the snapshots of peer 1", "it waits for the snapshot")
    sentence = "stopped by SIGINT before the end of its first round; start the same command again to continue"
    assert_leaves(fetching, signal.SIGINT, sentence)


def test_in_a_transfer_to_another_while_the_learner_does_not_react(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=5)
    large = str(4 << 20)  # more than is under way at a time
    giving = peers.start(0, LIGHT_FLOATS=large)
    fetching = peers.start(1, command=doctored(SLUGGISH), LIGHT_FLOATS=large)
    fetching.says("has read a little")
    os.kill(giving.learner(), signal.SIGSTOP)  # what takes long must not add up
    assert_leaves(giving, signal.SIGTERM, "stopped by SIGTERM .*; start the same command again to continue")
    fetching.kill()


@pytest.mark.parametrize("number", SIGNALS)
def test_while_it_lingers(mesh: Callable[..., Peers], number: signal.Signals) -> None:
    peers = mesh(2, rounds=2)
    lingering, other = peers.start(0), peers.start(1, command=doctored(INSATIABLE))
    lingering.says("serving on until every other peer has what it needs, 20 s at most")
    assert_leaves(
        lingering,
        number,
        f"stopped by {number.name}; all 2 rounds are done, but other peers may still need this one: start the same "
        "command again to serve them",
    )
    other.kill()


def test_the_linger_time_ends(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=2, linger=1.0)
    lingering, _ = peers.start(0), peers.start(1, command=doctored(INSATIABLE))
    assert lingering.ended(30) == ExitCode.RESERVATIONS, lingering.output
    assert re.search("WARNING leaving after 1 s, though peer 1 may not have everything", lingering.output)
    assert "peer 1 may still need this one (start the same command again to serve it)" in lingering.output


def test_a_finished_peer_that_is_started_again_waits_for_nobody(mesh: Callable[..., Peers]) -> None:
    """All others have told it that they have everything; a service manager may start it as often as it likes."""
    peers = mesh(2, rounds=2)
    for each in peers.start_all():
        assert each.ended() == ExitCode.COMPLETE, each.output
    before = peers.state(0).joinpath("result.json").read_text()
    again = peers.start(0, "--linger", "1")
    again.says("all have had what they need; serving 1 s more, should one come that lost its disk")
    assert again.ended(15) == ExitCode.COMPLETE, again.output
    assert "leaving after" not in again.output
    assert json.loads(peers.state(0).joinpath("result.json").read_text())["best_round"] == 2
    assert json.loads(before)["best_round"] == 2


def test_what_a_finished_peer_found_best_stays(mesh: Callable[..., Peers]) -> None:
    """Under policy quorum others may publish better models for the last round when all is over here."""
    peers = mesh(2, rounds=3)
    for each in peers.start_all():
        assert each.ended() == ExitCode.COMPLETE, each.output
    path = peers.state(0) / "best.json"
    path.write_text(json.dumps({"round": 2, "accuracy": 0.0}))
    again = peers.start(0, "--linger", "1")
    assert again.ended(15) == ExitCode.COMPLETE, again.output
    assert again.result().best_round == 2


def test_the_peers_of_up_end_when_it_is_killed(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=3)
    peers.tell("hold", 2)
    process = subprocess.Popen(**up_command(peers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    logs = [peers.folder / f"out/peers/{i}/log.txt" for i in range(2)]
    try:
        until(lambda: all(log.exists() and "round 1 of 3 is published" in log.read_text() for log in logs), "round 1")
        pids = [int(log.with_name("service.pid").read_text()) for log in logs]
    finally:
        process.kill()
        process.wait()
    until(lambda: all(has_ended(pid, log.parent) for pid, log in zip(pids, logs, strict=True)), "the peers end", 10)
    for log in logs:
        assert "stopped by SIGTERM after round 1 of 3" in log.read_text()
    peers.tell("hold", None)
    assert up(peers).returncode == ExitCode.COMPLETE


def test_at_any_moment_of_a_start_with_a_real_learner(mesh: Callable[..., Peers]) -> None:
    """From the first moment at which the service has a log to torch's being imported."""
    peers = mesh(1, light=False, rounds=100_000)
    for moment in (
        lambda each: each.process.poll() is None,
        lambda each: "listening" in each.output,
        lambda each: each.learner() and not has_ended(each.learner(), each.state),
        lambda each: "learner on cpu" in each.output,
        lambda each: each.last_round() >= 2,
    ):
        each = peers.start(0, command=(sys.executable, "-P", "-m", "peer"))
        if moment(each):  # not before Python itself is ready: its first 50 ms are nobody's
            until(lambda each=each: (each.state / "lock").exists(), "it has started")
        until(lambda each=each, moment=moment: moment(each), "the moment has come")
        assert_leaves(each, signal.SIGINT, r".*; start the same command again to continue")
