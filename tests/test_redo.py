"""Training that diverges is redone from the last good round, at a lower learning rate, and is never published."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from crad_p2p import client as client_module
from crad_p2p import weights
from crad_p2p.client import Client
from crad_p2p.data.datasets import Dataset, ImageSet, load_dataset
from crad_p2p.data.partition import Split
from crad_p2p.distillation import EpochLog, train_epoch
from crad_p2p.errors import DivergedError, ExitCode
from crad_p2p.federation import Federation, build_federation
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.results import RoundRecord
from crad_p2p.simulation import simulate
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE, SnapshotError

CPU = torch.device("cpu")
ARCH = "cnn6@0.1"  # with batch norm: its running statistics are no parameters
RATE = 0.02
Files = tuple[bytes, bytes]


def client_of(folder: Path, rate: float = RATE, **options: Any) -> Client:
    rng = np.random.default_rng(5)
    part = ImageSet(rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8), rng.integers(0, 3, 40))
    federation = build_federation(
        {
            "federation": "redo",
            "training": {"batch_size": 8, "learning_rate": rate},
            "peers": [{"id": i, "address": f"host:{i + 1}", "arch": ARCH} for i in (4, 9)],
        },
        "test",
    )
    split = Split(np.arange(24), np.arange(24, 32), np.arange(32, 40))
    data = Dataset("made", part, part, tuple("abc"), (0.5,), (0.5,), "crop")
    return Client(federation, 4, data, split, device=CPU, folder=folder, **options)


def files_of(client: Client) -> Files:
    return client.snapshot(), client.checkpoint()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, bytes]:
    client = client_of(tmp_path_factory.mktemp("teacher"))
    client.id = 9
    client.initialise()
    snapshot = client.snapshot()
    manifest = Manifest(
        run="a" * 64,
        peer=9,
        round=0,
        arch=ARCH,
        size=len(snapshot),
        sha256=hashlib.sha256(snapshot).hexdigest(),
        statistics=ClassStatistics(counts=(3, 3, 2), hits=(1, 3, 1), predicted=(1, 5, 2)),
        consumed=(),
        model_round=0,
        missing=(),
        quarantined=(),
    )
    return manifest, snapshot


class LastGood:
    """The files of the round before; counts how often they are asked for."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.calls = 0

    def __call__(self) -> Files:
        self.calls += 1
        return self.files


def one_round(client: Client, teacher: tuple[Manifest, bytes]) -> tuple[EpochLog, LastGood]:
    last_good = LastGood(files_of(client))
    client.open_round()
    client.teach(*teacher)
    return client.train([9], last_good), last_good


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, teacher: tuple[Manifest, bytes]) -> list[Files]:
    """Rounds 0 and 1; from round 1 on there is momentum."""
    client = client_of(tmp_path_factory.mktemp("good"))
    client.initialise()
    files = [files_of(client)]
    log, last_good = one_round(client, teacher)
    assert (log.redone, last_good.calls) == (0, 0)
    return [*files, files_of(client)]


def poison_loss(_client: Client, log: EpochLog, value: float) -> None:
    log.loss = value


def poison_weight(client: Client, _log: EpochLog, value: float) -> None:
    with torch.no_grad():
        client.model.get_parameter("classifier.weight").view(-1)[0] = value


def poison_statistic(client: Client, _log: EpochLog, value: float) -> None:
    client.model.get_buffer("norms.0.running_mean")[0] = value


Poison = Callable[[Client, EpochLog, float], None]
#: What goes wrong, and what is said of it.
POISONS = [
    pytest.param(poison_loss, math.nan, "the loss is nan", id="loss-nan"),
    pytest.param(poison_loss, math.inf, "the loss is inf", id="loss-inf"),
    pytest.param(poison_weight, math.nan, "tensor 'classifier.weight' holds values that are not", id="weight-nan"),
    pytest.param(poison_weight, -2e6, "tensor 'classifier.weight' holds values that are not", id="weight-large"),
    pytest.param(poison_statistic, math.inf, "tensor 'norms.0.running_mean' holds values that are", id="buffer-inf"),
]


class Diverging:
    """``train_epoch`` that spoils its first results; its learning rates."""

    def __init__(self, client: Client, times: int, poison: Poison = poison_loss, value: float = math.nan) -> None:
        self.rates: list[float] = []
        self._client, self._times, self._poison, self._value = client, times, poison, value

    def __call__(self, model: Any, optimizer: Any, *arguments: Any) -> EpochLog:
        self.rates.append(optimizer.learning_rate)
        log = train_epoch(model, optimizer, *arguments)
        if len(self.rates) <= self._times:
            self._poison(self._client, log, self._value)
        return log


@pytest.mark.parametrize("number", [0, 1], ids=["no-momentum", "momentum"])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(("poison", "value", "reason"), POISONS)
def test_a_redone_round_is_as_if_the_lower_learning_rate_had_been_there_from_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    teacher: tuple[Manifest, bytes],
    good: list[Files],
    number: int,
    times: int,
    poison: Poison,
    value: float,
    reason: str,
) -> None:
    rates = [0.02, 0.002, 0.0002, 0.00002][: times + 1]
    slow = client_of(tmp_path / "slow", rates[-1])
    slow.restore(number, *good[number])
    expected, _ = one_round(slow, teacher)

    said: list[str] = []
    client = client_of(tmp_path / "redone", warn=said.append)
    client.restore(number, *good[number])
    diverging = Diverging(client, times, poison, value)
    monkeypatch.setattr(client_module, "train_epoch", diverging)
    log, last_good = one_round(client, teacher)

    assert files_of(client) == files_of(slow)
    assert log == replace(expected, redone=times)
    assert diverging.rates == pytest.approx(rates, rel=1e-12)
    assert last_good.calls == times
    assert client.round == number + 1
    assert len(said) == times
    for attempt, text in enumerate(said, 1):
        assert text.startswith(f"round {number + 1}: training diverged ({reason}")
        end = f"redone from round {number} at learning rate {rates[attempt]:g}, attempt {attempt} of 3"
        assert text.endswith(f"); {end}")


def test_the_next_round_is_at_the_configured_learning_rate_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: tuple[Manifest, bytes], good: list[Files]
) -> None:
    client = client_of(tmp_path / "redone")
    client.restore(1, *good[1])
    diverging = Diverging(client, 2)
    monkeypatch.setattr(client_module, "train_epoch", diverging)
    one_round(client, teacher)
    again = client_of(tmp_path / "again")  # a learner that starts from the redone round knows nothing of it
    again.restore(2, *files_of(client))
    log, _ = one_round(client, teacher)
    assert log.redone == 0
    assert diverging.rates[-2:] == [RATE / 100, RATE]
    one_round(again, teacher)
    assert files_of(again) == files_of(client)


def test_a_learner_that_is_killed_while_it_redoes_a_round_ends_up_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: tuple[Manifest, bytes], good: list[Files]
) -> None:
    class KilledError(Exception):
        pass

    def die(_text: str) -> None:
        raise KilledError

    clients = [client_of(tmp_path / "one"), client_of(tmp_path / "killed", warn=die), client_of(tmp_path / "two")]
    for client in clients:
        client.restore(1, *good[1])
        monkeypatch.setattr(client_module, "train_epoch", Diverging(client, 2, poison_weight))
        try:
            one_round(client, teacher)
        except KilledError:
            assert client is clients[1]
    assert files_of(clients[0]) == files_of(clients[2])
    assert clients[0].snapshot() != clients[1].snapshot()


@pytest.mark.parametrize(("poison", "value", "reason"), POISONS)
def test_after_three_more_attempts_it_is_given_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    teacher: tuple[Manifest, bytes],
    good: list[Files],
    poison: Poison,
    value: float,
    reason: str,
) -> None:
    said: list[str] = []
    client = client_of(tmp_path, warn=said.append)
    client.restore(1, *good[1])
    diverging = Diverging(client, 4, poison, value)
    monkeypatch.setattr(client_module, "train_epoch", diverging)
    with pytest.raises(DivergedError) as ended:
        one_round(client, teacher)
    assert len(diverging.rates) == 4
    assert len(said) == 3
    assert ended.value.exit_code == ExitCode.LEARNER_FAILED
    sentence = str(ended.value)
    assert sentence.startswith(
        f"peer 4: training of round 2 diverged at each of the learning rates 0.02, 0.002, 0.0002, 2e-05 (the last "
        f"time: {reason}"
    )
    assert "nothing after round 1 was published" in sentence
    assert "start a new run with a training.learning_rate below 0.02 in the federation file of every peer" in sentence
    # Whoever asks for its files all the same gets those of the last good round.
    assert client.round == 1
    assert files_of(client) == good[1]


def test_without_a_listener_the_log_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    teacher: tuple[Manifest, bytes],
    good: list[Files],
) -> None:
    client = client_of(tmp_path)
    client.restore(1, *good[1])
    monkeypatch.setattr(client_module, "train_epoch", Diverging(client, 1))
    one_round(client, teacher)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "round 2: training diverged (the loss is nan); redone from round 1 at learning rate 0.002, attempt 1 of 3"
    )


def test_files_of_the_last_good_round_that_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: list[Files]
) -> None:
    client = client_of(tmp_path)
    client.restore(1, *good[1])
    monkeypatch.setattr(client_module, "train_epoch", Diverging(client, 1))
    client.open_round()
    with pytest.raises(SnapshotError):
        client.train([], lambda: (good[1][0], good[1][1][:-1]))
    assert client.round == 1


# --- training that really diverges ------------------------------------------------------------------------------------

#: A step multiplies every weight by 1 - rate * decay: at 1000, 100 and 10 they leave the range of floats within the
#: forty steps of an epoch, at 1 they do not.
REALLY = {"batch_size": 4, "learning_rate": 1e3, "weight_decay": 1.0}


def really_diverging(**training: Any) -> Federation:
    tree = {
        "federation": "really",
        "rounds": 2,
        "data": {"dataset": "digits", "samples": 200},
        "training": {**REALLY, **training},
        "peers": [{"id": i, "address": f"127.0.0.1:{7401 + i}", "arch": "cnn6@0.125"} for i in (0, 5)],
    }
    return build_federation(tree, "test")


def run(settings: Federation, **options: Any) -> list[RoundRecord]:
    dataset = load_dataset(settings.data, seed=settings.seed, data_dir=Path())
    _, history = simulate(settings, dataset, device=CPU, threads=1, **options)
    return history


@pytest.mark.parametrize("workers", [1, 2])
def test_a_simulation_redoes_and_tells(caplog: pytest.LogCaptureFixture, workers: int) -> None:
    history = run(really_diverging(), workers=workers)
    expected = run(really_diverging(learning_rate=1.0))
    assert [(r.round, r.peer, r.redone) for r in history] == [(n, i, 3) for n in (1, 2) for i in (0, 5)]
    assert {r.redone for r in expected} == {0}
    assert all(r.train_loss is not None and math.isfinite(r.train_loss) for r in history)
    assert [r.snapshot_sha256 for r in history] == [r.snapshot_sha256 for r in expected]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    reason = "training diverged (the loss is nan)"
    assert sorted(said) == sorted(
        f"peer {i}: round {n}: {reason}; redone from round {n - 1} at learning rate {rate}, attempt {attempt} of 3"
        for i in (0, 5)
        for n in (1, 2)
        for rate, attempt in ((100, 1), (10, 2), (1, 3))
    )


def test_a_simulation_ends_where_no_learning_rate_helps() -> None:
    seen: list[int] = []
    with pytest.raises(DivergedError, match=r"round 1 diverged at each of the learning rates 10000, 1000, 100, 10 "):
        run(really_diverging(learning_rate=1e4), on_round=lambda number, _records: seen.append(number))
    assert not seen


# --- the learner process ----------------------------------------------------------------------------------------------


def test_the_learner_goes_back_to_the_folder_it_is_given(tmp_path: Path) -> None:
    settings = really_diverging()
    path = tmp_path / "peers.yaml"
    path.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    folders = [tmp_path / str(number) for number in (0, 1, 2)]
    for folder in folders:
        folder.mkdir()
    arguments = ["--id", "5", "--peers", str(path), "--scratch", str(tmp_path / "scratch")]
    learner = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "crad_p2p.learner",
            *arguments,
            "--device",
            "cpu",
            "--precision",
            "auto",
            "--threads",
            "1",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert learner.stdin is not None
    assert learner.stdout is not None
    seen: list[dict[str, Any]] = []

    def send(**command: Any) -> None:
        assert learner.stdin is not None
        print(json.dumps(command), file=learner.stdin, flush=True)

    def answer() -> dict[str, Any]:
        assert learner.stdout is not None
        for line in learner.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] not in ("progress", "ready"):
                seen.append(event)
            if event["event"] in ("trained", "failed"):
                return event
        pytest.fail("the learner ended")

    def train(number: int) -> dict[str, Any]:
        send(do="open")
        last, folder = str(folders[number - 1]), str(folders[number])
        send(do="train", teachers=[], last=last, folder=folder)
        return answer()

    try:
        send(do="initialise", folder=str(folders[0]))
        assert answer()["log"]["redone"] == 0
        trained = train(1)
        assert (trained["round"], trained["log"]["redone"]) == (1, 3)
        assert [event["event"] for event in seen] == ["trained", *["warning"] * 3, "trained"]
        assert seen[1]["message"].startswith("round 1: training diverged (the loss is nan); redone from round 0 at")
        assert seen[2]["message"].endswith("at learning rate 10, attempt 2 of 3")
        weights.check_values(weights.decode((folders[1] / SNAPSHOT_FILE).read_bytes()))

        checkpoint = folders[1] / CHECKPOINT_FILE
        checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
        failed = train(2)
        assert (failed["event"], failed["exit_code"]) == ("failed", ExitCode.LEARNER_FAILED)
        assert failed["message"].startswith(f"{folders[1]} is damaged: not a safetensors file")
        assert learner.wait(20) == ExitCode.LEARNER_FAILED
        assert not list(folders[2].iterdir())
    finally:
        learner.kill()
        learner.wait()
        learner.stdin.close()
        learner.stdout.close()
