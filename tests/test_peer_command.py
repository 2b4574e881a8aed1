"""``crad-peer`` as a user meets it: sentences and exit codes, one peer from start to end, and kills at any moment."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import (
    COMMAND,
    ENVIRONMENT,
    Peer,
    assert_one_sentence,
    federation_file,
    free_port,
    has_ended,
    until,
)

import peer.node
from crad_p2p import __version__
from crad_p2p.data.datasets import load_dataset
from crad_p2p.device import resolve_precision
from crad_p2p.errors import ExitCode, IncompleteError
from crad_p2p.federation import Federation, load_federation
from crad_p2p.results import PeerResult
from crad_p2p.simulation import simulate
from peer.host import Host
from peer.node import Node
from peer.store import Store

CPU = torch.device("cpu")

ROUNDS = 80


def crad_peer(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [COMMAND, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**ENVIRONMENT, **environment},
    )


# --- the command line -------------------------------------------------------------------------------------------------


def test_version(tmp_path: Path) -> None:
    ended = crad_peer(tmp_path, "--version")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"crad-peer {__version__}\n", "")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--id", "0"], "--peers"),
        (["--peers", "peers.yaml"], "--id"),
        (["--id", "zero", "--peers", "peers.yaml"], "--id"),
        (["--id", "0", "--peers", "peers.yaml", "--log-format", "xml"], "--log-format"),
    ],
)
def test_usage(tmp_path: Path, options: list[str], named: str) -> None:
    ended = crad_peer(tmp_path, *options)
    assert ended.returncode == ExitCode.USAGE
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


def peer_entry(**changes: Any) -> dict[str, Any]:
    return {"id": 0, "address": "127.0.0.1:7400", "arch": "cnn6@0.125", **changes}


@pytest.mark.parametrize(
    ("changes", "options", "code", "sentence"),
    [
        ({"rounds": 0}, [], ExitCode.CONFIGURATION, r"peers\.yaml: 'rounds': must be .*found 0"),
        (
            {"method": {"temprature": 3}},
            [],
            ExitCode.CONFIGURATION,
            r"'method\.temprature' is not a field.*temperature",
        ),
        (
            {"peers": [peer_entry(arch="vgg")]},
            [],
            ExitCode.CONFIGURATION,
            r"peers\.0\.arch: architecture 'vgg' is unkn",
        ),
        ({"data": {"dataset": "mnist"}}, [], ExitCode.CONFIGURATION, "data set 'mnist' is unknown"),
        (
            {},
            ["--id", "4"],
            ExitCode.CONFIGURATION,
            r"peer id 4 is not in the federation file peers\.yaml; its ids are 0",
        ),
        ({}, ["--peers", "none.yaml"], ExitCode.CONFIGURATION, r"none\.yaml: cannot be read \(No such file"),
        ({}, ["--state-dir", "peers.yaml"], ExitCode.CONFIGURATION, r"state directory peers\.yaml: cannot be written"),
        (
            {"peers": [peer_entry(address="10.1.2.3:7400")]},
            ["--insecure"],
            ExitCode.CERTIFICATE,
            r"address 10\.1\.2\.3:7400:",
        ),
        (
            {"peers": [peer_entry(), peer_entry(id=1, address="b.example.org:7400")]},
            ["--insecure"],
            ExitCode.CERTIFICATE,
            r"peer 1 has the address b\.example\.org:7400",
        ),
        (
            {},
            ["--listen", "0.0.0.0:7400", "--insecure"],
            ExitCode.CERTIFICATE,
            r"--listen has the address 0\.0\.0\.0:7400",
        ),
    ],
)
def test_a_wrong_setting(
    tmp_path: Path, changes: dict[str, Any], options: list[str], code: ExitCode, sentence: str
) -> None:
    federation_file(tmp_path, **changes)
    # The last of an option given twice counts.
    ended = crad_peer(tmp_path, "--id", "0", "--peers", "peers.yaml", *options)
    assert ended.stdout == ""
    assert_one_sentence(ended.stderr, ended.returncode, code, sentence)


def test_a_file_that_is_not_yaml(tmp_path: Path) -> None:
    (tmp_path / "peers.yaml").write_text("federation: one\npeers: [")
    ended = crad_peer(tmp_path, "--id", "0", "--peers", "peers.yaml")
    sentence = r"peers\.yaml, line 2, column \d+: is not valid YAML"
    assert_one_sentence(ended.stderr, ended.returncode, ExitCode.CONFIGURATION, sentence)


@pytest.mark.parametrize("shares", [False, True])
def test_a_port_that_is_taken(tmp_path: Path, shares: bool) -> None:
    """Also by somebody who would share it, as gRPC's servers do unless told otherwise."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=shares) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        path = federation_file(tmp_path)
        ended = crad_peer(tmp_path, "--id", "0", "--peers", str(path), "--listen", listen)
    assert_one_sentence(ended.stderr, ended.returncode, ExitCode.PORT_TAKEN, f"cannot listen on {listen}: the port")


def test_a_state_directory_in_use(tmp_path: Path) -> None:
    path = federation_file(tmp_path)
    store = Store(tmp_path / "crad-state/0")  # the default, under the working directory
    store.open(load_federation(path), 0)
    ended = crad_peer(tmp_path, "--id", "0", "--peers", str(path))
    store.close()
    sentence = rf"peer 0 is already running on .*crad-state/0 \(process {os.getpid()}\)"
    assert_one_sentence(ended.stderr, ended.returncode, ExitCode.ALREADY_RUNNING, sentence)


def test_the_state_directory_of_another_run(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.open(load_federation(federation_file(tmp_path, seed=1)), 0)
    store.close()
    (tmp_path / "state/rounds/000000").mkdir()  # without any round it would belong to nobody
    path = federation_file(tmp_path, seed=2)
    ended = crad_peer(tmp_path, "--id", "0", "--peers", str(path), "--state-dir", "state")
    sentence = "state directory state belongs to another run: seed is 1 in the state directory and 2 in the federation"
    assert_one_sentence(ended.stderr, ended.returncode, ExitCode.CONFIGURATION, sentence)


def save_npz(path: Path, labels: list[int]) -> None:
    images = np.zeros((len(labels), 8, 8), np.uint8)
    names = np.array(["healthy", "ill"])
    arrays = {"images": images, "labels": np.array(labels)}
    parts = {f"{part}_{name}": array for part in ("train", "test") for name, array in arrays.items()}
    np.savez(path, class_names=names, **parts)


#: What only the learner can find out: changed settings, options, exit code, sentence.
_LEARNER_CASES: dict[str, tuple[dict[str, Any], list[str], ExitCode, str]] = {
    "missing npz": ({"data": {"dataset": "npz:none.npz"}}, [], ExitCode.DATA, r"none\.npz: not found"),
    "label out of range": (
        {"data": {"dataset": "npz:bad.npz"}},
        [],
        ExitCode.DATA,
        r"bad\.npz: 'train_labels' row 3 is 2, but labels must be whole numbers from 0 to 1",
    ),
    "bad device": ({}, ["--device", "cuda:99"], ExitCode.CONFIGURATION, r"--device cuda:99: cannot be used \(.*\)"),
}


@pytest.fixture(scope="module")
def learner_cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Peer]]:
    """All started at once, since each has to wait for torch."""
    started = {}
    try:
        for name, (changes, options, _, _) in _LEARNER_CASES.items():
            folder = tmp_path_factory.mktemp("case")
            save_npz(folder / "bad.npz", [0, 1, 0, 2, 1])
            path = federation_file(folder, **changes)
            common = ["--id", "0", "--peers", str(path), "--device", "cpu", "--state-dir", str(folder / "state")]
            started[name] = Peer(folder, *common, *options, state=folder / "state")
        yield started
    finally:
        for each in started.values():
            each.end()


@pytest.mark.parametrize("name", _LEARNER_CASES)
def test_what_the_learner_finds_wrong(learner_cases: dict[str, Peer], name: str) -> None:
    _, _, code, sentence = _LEARNER_CASES[name]
    found = learner_cases[name].ended()
    assert_one_sentence(learner_cases[name].output, found, code, sentence)


def test_peers_that_disagree(tmp_path: Path, start: Callable[..., Peer]) -> None:
    peers = [peer_entry(id=i, address=f"127.0.0.1:{free_port()}") for i in range(2)]
    running = []
    for i, seed in enumerate((11, 22)):
        (tmp_path / str(i)).mkdir()
        path = federation_file(tmp_path / str(i), peers=peers, home=tmp_path, seed=seed)
        running.append(start("--id", str(i), "--peers", str(path), state=tmp_path / f"state-{i}"))
        until(lambda: "listening" in running[-1].output, "peer listens")
    until(lambda: any(each.process.poll() is not None for each in running), "one of two that disagree ends")
    ended = next(each for each in running if each.process.poll() is not None)
    i, other = running.index(ended), 1 - running.index(ended)
    values = ("11", "22")
    sentence = f"seed is {values[other]} in the file of peer {other} and {values[i]} in the file of peer {i};"
    assert_one_sentence(ended.output, ended.process.returncode, ExitCode.PEERS_DISAGREE, sentence)


# --- one peer, from start to end --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of rounds 1 to ROUNDS, as the method gives them in one process without any service."""
    path = federation_file(tmp_path_factory.mktemp("reference"), rounds=ROUNDS)
    federation: Federation = load_federation(path)
    dataset = load_dataset(federation.data, seed=federation.seed, data_dir=path.parent)
    _, history = simulate(federation, dataset, device=CPU, precision=resolve_precision("auto", CPU), threads=1)
    assert len({record.snapshot_sha256 for record in history}) == ROUNDS
    return [record.snapshot_sha256 for record in history]


def assert_as_expected(peer: Peer, expected: list[str]) -> None:
    """Every round stands in the history once, in order, with the digest that it must have."""
    history = peer.history()
    assert [record.round for record in history] == list(range(1, peer.last_round() + 1))
    assert len(history) >= 2
    digests = [record.snapshot_sha256 for record in history]
    assert digests[: len(expected)] == expected[: len(digests)]


def test_a_single_peer_runs_to_the_end(tmp_path: Path, start: Callable[..., Peer], expected: list[str]) -> None:
    path = federation_file(tmp_path, rounds=2)
    peer = start("--log-format", "json", CRAD_ID="0", CRAD_PEERS=str(path))
    assert peer.ended() == ExitCode.COMPLETE, peer.output
    assert_as_expected(peer, expected)
    lines = [json.loads(line) for line in peer.output.splitlines()]
    assert all({"time", "peer", "level", "event"} <= line.keys() for line in lines)
    assert any(line["event"].startswith("all 2 rounds are done; best round") for line in lines)
    assert not any("serving" in line["event"] for line in lines)  # whom?

    tree = json.loads((peer.state / "result.json").read_text())
    best = tree.pop("best_round")
    result = PeerResult.from_json(tree)
    assert (result.id, result.arch, result.train_samples, result.rounds_completed) == (0, "cnn6@0.125", 80, 2)
    assert result.snapshot_sha256 == expected[1]
    assert best in (1, 2)
    assert result.global_accuracy is not None
    assert len(result.global_accuracy_per_class) == len(result.counts) == len(result.hits) == 10
    assert result.peak_rss_bytes > 50_000_000
    assert result.seconds.train > 0
    assert {path.name for path in peer.state.glob("rounds/*")} == {"000001", "000002"}  # two last ones, best among them
    assert has_ended(peer.learner(), peer.state)


def test_a_killed_learner_is_started_again_and_changes_nothing(
    tmp_path: Path, start: Callable[..., Peer], expected: list[str]
) -> None:
    path = federation_file(tmp_path, rounds=ROUNDS)
    peer = start("--id", "0", "--peers", str(path))
    peer.reach(3)
    first = peer.learner()
    os.kill(first, signal.SIGKILL)
    assert peer.ended() == ExitCode.COMPLETE, peer.output
    assert "WARNING the learner process was killed by SIGKILL; starting it again" in peer.output
    assert peer.learner() != first
    assert_as_expected(peer, expected)
    assert len(peer.history()) == ROUNDS


def test_a_learner_that_ends_at_every_start_is_given_up(tmp_path: Path, start: Callable[..., Peer]) -> None:
    peer = start("--id", "0", "--peers", str(federation_file(tmp_path)))
    killed = 0
    for _ in range(5):
        until(lambda: peer.learner() not in (0, killed), "another learner")  # noqa: B023
        killed = peer.learner()
        os.kill(killed, signal.SIGKILL)
    code = peer.ended()
    sentence = "the learner process was killed by SIGKILL, 5 times without finishing a round"
    assert_one_sentence(peer.output, code, ExitCode.LEARNER_FAILED, sentence)
    assert peer.output.count("starting it again") == 4


def test_a_peer_that_is_stopped_before_its_first_round_ends_at_once(tmp_path: Path, start: Callable[..., Peer]) -> None:
    peer = start("--id", "0", "--peers", str(federation_file(tmp_path)))
    until(peer.learner, "the learner is starting")
    peer.process.send_signal(signal.SIGTERM)
    code = peer.ended(5)
    assert_one_sentence(peer.output, code, ExitCode.INCOMPLETE, "stopped by SIGTERM .*start the same command again")


def test_stopped_or_killed_at_any_time_the_same_command_continues(
    tmp_path: Path, start: Callable[..., Peer], expected: list[str]
) -> None:
    command = ["--id", "0", "--peers", str(federation_file(tmp_path, rounds=100_000))]

    stopped = start(*command)
    stopped.reach(3)
    stopped.process.send_signal(signal.SIGTERM)
    code = stopped.ended(5)
    reached = stopped.last_round()
    assert reached < 99_000
    sentence = r"stopped by SIGTERM after round \d+ of 100000; start the same command again to continue"
    assert re.fullmatch(f"crad-peer: {sentence}", stopped.output.splitlines()[-1])
    assert_one_sentence(stopped.output, code, ExitCode.INCOMPLETE, sentence)
    assert has_ended(stopped.learner(), stopped.state)

    killed = start(*command)
    killed.reach(reached + 3)
    assert f"INFO    continues after round {reached} of 100000\n" in killed.output
    assert f"round {reached} of 100000 is published" not in killed.output  # committed rounds are not trained again
    learner = killed.learner()
    killed.process.kill()
    assert killed.ended() == -signal.SIGKILL
    until(lambda: has_ended(learner, killed.state), "a learner without its service ends by itself", 5)
    reached = killed.last_round()

    again = start(*command)
    again.reach(reached + 3)
    again.process.send_signal(signal.SIGINT)
    code = again.ended(5)
    assert_one_sentence(again.output, code, ExitCode.INCOMPLETE, "stopped by SIGINT after round")
    assert_as_expected(again, expected)


def test_peers_with_different_data_both_say_so_and_end(tmp_path: Path, start: Callable[..., Peer]) -> None:
    """The file's name is the same, so the federation files agree; what is in it does not."""
    peers = [{"id": i, "address": f"127.0.0.1:{free_port()}", "arch": "cnn6@0.125"} for i in (0, 1)]
    started = []
    for peer_id, classes in ((0, 3), (1, 4)):
        folder = tmp_path / f"host{peer_id}"
        folder.mkdir()
        labels = np.arange(200) % classes
        images = np.zeros((200, 8, 8), dtype=np.uint8)
        np.savez(folder / "x.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
        data = {"dataset": "npz:x.npz"}
        path = federation_file(folder, peers=peers, home=tmp_path, rounds=1000, data=data)
        started.append(start("--id", str(peer_id), "--peers", str(path), state=tmp_path / f"state{peer_id}"))
    for peer_id, each in enumerate(started):
        code = each.ended()
        sentence = (
            f"peers {peer_id} and {1 - peer_id} have different data: the class list has {3 + (1 - peer_id)} classes on "
            f"peer {1 - peer_id} and {3 + peer_id} on peer {peer_id}"
        )
        assert_one_sentence(each.output, code, ExitCode.PEERS_DISAGREE, sentence)


# --- training that diverges -------------------------------------------------------------------------------------------

#: A step multiplies every weight by 1 - rate * decay: of 1000, 100, 10 and 1 only the last leaves them in bounds.
_DIVERGING = {"batch_size": 4, "weight_decay": 1.0, "learning_rate": 1e3}


def test_rounds_that_diverge_are_redone_and_give_the_bytes_of_the_simulation(
    tmp_path: Path, start: Callable[..., Peer]
) -> None:
    peers = [{"id": i, "address": f"127.0.0.1:{free_port()}", "arch": "cnn6@0.125"} for i in (0, 1)]
    path = federation_file(tmp_path, peers=peers, rounds=3, training=_DIVERGING)
    running = [start("--id", str(i), "--peers", str(path), state=tmp_path / f"state{i}") for i in (0, 1)]
    until(lambda: "round 2: training diverged" in running[0].output, "peer 0 redoes a round")
    os.kill(running[0].learner(), signal.SIGKILL)
    federation = load_federation(path)
    dataset = load_dataset(federation.data, seed=federation.seed, data_dir=tmp_path)
    _, simulated = simulate(federation, dataset, device=CPU, precision=resolve_precision("auto", CPU), threads=1)
    for i, each in enumerate(running):
        assert each.ended() == ExitCode.COMPLETE, each.output
        expected = [(r.round, r.redone, r.snapshot_sha256, r.train_loss) for r in simulated if r.peer == i]
        assert [redone for _, redone, _, _ in expected] == [3, 3, 3]
        assert [(r.round, r.redone, r.snapshot_sha256, r.train_loss) for r in each.history()] == expected
        for number, attempt, rate in ((1, 1, 100), (3, 2, 10)):
            assert (
                f" peer {i} WARNING round {number}: training diverged (the loss is nan); redone from round "
                f"{number - 1} at learning rate {rate}, attempt {attempt} of 3\n"
            ) in each.output
    assert "WARNING the learner process was killed by SIGKILL; starting it again" in running[0].output


def test_a_peer_that_diverges_at_every_learning_rate_ends_and_publishes_nothing(
    tmp_path: Path, start: Callable[..., Peer]
) -> None:
    path = federation_file(tmp_path, training={**_DIVERGING, "learning_rate": 1e4})
    good: dict[str, bytes] = {}
    for _ in range(2):  # another start finds the last good round as it was, and ends the same way
        peer = start("--id", "0", "--peers", str(path))
        sentence = (
            "peer 0: training of round 1 diverged at each of the learning rates 10000, 1000, 100, 10 "
            r"\(the last time: .*\); nothing after round 0 was published\. .*a training\.learning_rate below 10000"
        )
        code = peer.ended()
        assert_one_sentence(peer.output, code, ExitCode.LEARNER_FAILED, sentence)
        assert peer.output.count("WARNING round 1: training diverged") == 3
        assert "round 1 of 2 is published" not in peer.output
        assert [path.name for path in peer.state.glob("rounds/[0-9]*")] == ["000000"]
        files = {path.name: path.read_bytes() for path in peer.state.glob("rounds/000000/*")}
        assert {"snapshot.safetensors", "checkpoint.safetensors", "manifest.json"} <= files.keys()
        assert good in ({}, files)
        good = files
        assert peer.history() == []


# --- a learner that ends at a chosen moment ---------------------------------------------------------------------------


class ScriptedLearner:
    """Answers without training; ``is_killed`` as soon as it has finished its first round."""

    pid = 0

    def __init__(self, *, is_killed: bool) -> None:
        self.commands: list[str] = []
        self._is_killed = is_killed
        self._events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._events.put_nowait(
            {
                "event": "ready",
                "layouts": {"cnn6@0.125": {}},
                "free_bytes": None,
                "total_bytes": None,
                "batch_bytes": 0,
                "class_names": ["even", "odd"],
                "image_shape": [1, 8, 8],
                "partition_digest": "",
                "validation_counts": None,
                "train_samples": 1,
                "device": "cpu",
                "precision": "float32",
            }
        )
        self._rounds = 0

    def send(self, do: str, **fields: Any) -> None:
        self.commands.append(do)
        if do in ("initialise", "train"):
            self._events.put_nowait(self._trained(self._rounds, **fields))
            self._rounds += 1
            if self._is_killed:
                self._events.put_nowait(None)
        elif do == "restore":
            self._rounds = fields["round"] + 1
            self._events.put_nowait({"event": "restored", "round": fields["round"]})
        elif do == "evaluate":
            accuracies = {"global_accuracy": 0.5, "local_accuracy": 0.5, "global_accuracy_per_class": [0.5, 0.5]}
            self._events.put_nowait({"event": "evaluated", "peak_rss_bytes": 1, **accuracies})

    @staticmethod
    def _trained(number: int, folder: str, **_: Any) -> dict[str, Any]:
        Path(folder, "snapshot.safetensors").write_bytes(b"snapshot")
        Path(folder, "checkpoint.safetensors").write_bytes(b"")
        return {
            "event": "trained",
            "round": number,
            "folder": folder,
            "size": 8,
            "sha256": hashlib.sha256(b"snapshot").hexdigest(),
            "statistics": {"counts": [1, 1], "hits": [1, 0], "predicted": [2, 0]},
            "global_accuracy": None,
            "log": {"loss": 1.0, "target_mass": None, "target_collapsed": None, "target_top1": None, "redone": 0},
            "seconds": {"teachers": 0.0, "train": 0.0, "validate": 0.0},
            "peak_rss_bytes": 1,
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        while (event := await self._events.get()) is not None:
            yield event

    async def wait(self) -> int:
        return -signal.SIGKILL

    async def stop(self) -> None:
        pass


def run_with_scripted_learners(path: Path, monkeypatch: pytest.MonkeyPatch, *, kill: bool) -> list[ScriptedLearner]:
    """Run the service of the only peer to its end, with learners of which the first is killed or not."""
    learners: list[ScriptedLearner] = []
    second_started = threading.Event()
    commit = Store.commit

    class Starter:
        @staticmethod
        async def start(_arguments: list[str]) -> ScriptedLearner:
            learners.append(ScriptedLearner(is_killed=kill and not learners))
            if len(learners) == 2:
                second_started.set()
            return learners[-1]

    def slow_commit(store: Store, *arguments: Any) -> None:
        if kill:
            second_started.wait(0.5)  # on a slow disk the next learner may be there before the round is
        commit(store, *arguments)

    federation = load_federation(path)
    host = Host(
        peer_id=0,
        peers_file=path,
        listen=federation.peer(0).address,
        state_dir=path.parent / "state",
        data_dir=None,
        download=False,
        device="cpu",
        precision="float32",
        threads=1,
        tls_dir=None,
    )
    with monkeypatch.context() as patch:
        patch.setattr(peer.node, "LearnerProcess", Starter)
        patch.setattr(Store, "commit", slow_commit)
        asyncio.run(asyncio.wait_for(Node(federation, host).run(), 20))
    return learners


def test_what_a_kill_after_the_last_commit_left_out_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = federation_file(tmp_path, rounds=2)
    (learner,) = run_with_scripted_learners(path, monkeypatch, kill=False)
    assert learner.commands == ["initialise", "open", "train", "open", "train", "evaluate"]
    history, result = tmp_path / "state/history.jsonl", tmp_path / "state/result.json"
    whole = history.read_text(), json.loads(result.read_text())
    history.write_text(whole[0].splitlines(keepends=True)[0])
    result.unlink()
    (learner,) = run_with_scripted_learners(path, monkeypatch, kill=False)
    assert learner.commands == ["restore", "evaluate"]
    assert (history.read_text(), json.loads(result.read_text())) == whole


def test_a_learner_that_is_killed_while_its_round_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = federation_file(tmp_path, rounds=1)
    _, second = run_with_scripted_learners(path, monkeypatch, kill=True)
    assert second.commands == ["restore", "open", "train", "evaluate"]


def test_a_server_that_ends_by_itself_ends_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would train on, and nobody could reach it."""

    async def ends(_server: object) -> None:
        raise IncompleteError("the server has ended")

    monkeypatch.setattr("peer.server.Server.watch", ends)
    with pytest.raises(IncompleteError, match="the server has ended"):
        run_with_scripted_learners(federation_file(tmp_path, rounds=3000), monkeypatch, kill=False)
