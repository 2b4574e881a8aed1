"""Noise on the class counts: what is published instead of the true ones, all through a run, whatever happens."""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import stopped_at
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from processes import Peer, Peers, federation_file

from crad_p2p.aggregation import Aggregation, aggregate
from crad_p2p.client import Client
from crad_p2p.data.datasets import Dataset, load_dataset
from crad_p2p.data.partition import make_splits
from crad_p2p.errors import ConfigurationError, ExitCode
from crad_p2p.federation import Federation, build_federation, load_federation
from crad_p2p.learner import Learner
from crad_p2p.manifest import COUNT_LIMIT, ClassStatistics, Manifest
from crad_p2p.methods import backbone
from crad_p2p.privacy import KEY_BYTES, KEY_FILE, create_key, load_key, noise, noised_counts, publishable
from crad_p2p.results import RoundRecord, Summary
from crad_p2p.simulation import simulate
from launch.preflight.here import describe_federation

CPU = torch.device("cpu")
KEY = bytes(range(KEY_BYTES))
KEYS = {peer: hashlib.sha256(bytes([peer])).digest() for peer in range(3)}
RUN = "a" * 64

# ------------------------------------------------------------------------------------------------------------- the draw


def draws(count: int, epsilon: float = 1.0, *, key: bytes = KEY, run: str = RUN, peer: int = 0) -> NDArray[np.int64]:
    return np.array([noise(key, epsilon, run, peer, label) for label in range(count)])


def test_the_draw_is_always_the_same() -> None:
    assert draws(50).tolist() == draws(50).tolist()
    # Written down once: another version that drew anew for a run that goes on would be a second release.
    assert draws(12).tolist() == [-1, 1, -1, 1, 0, 0, 1, -1, 0, -1, 2, 1]


@pytest.mark.parametrize("other", [{"key": bytes(KEY_BYTES)}, {"run": "b" * 64}, {"peer": 1}], ids=str)
def test_secret_run_peer_and_class_give_draws_of_their_own(other: dict[str, Any]) -> None:
    count = 4_000
    here, there = draws(count), draws(count, **other)
    assert abs(np.corrcoef(here, there)[0, 1]) < 4 / math.sqrt(count)
    assert abs(np.corrcoef(here[1:], here[:-1])[0, 1]) < 4 / math.sqrt(count)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_the_noise_has_the_law_of_rounded_laplace_noise(epsilon: float) -> None:
    count = 20_000
    seen = Counter(draws(count, epsilon).tolist())
    law = {0: 1 - math.exp(-epsilon / 2)}
    for k in range(1, 60):
        law[k] = law[-k] = math.exp(-epsilon * k) * math.sinh(epsilon / 2)
    common = {k: p * count for k, p in law.items() if p * count >= 10}
    rare = count - sum(common.values())
    chi = sum((seen[k] - expected) ** 2 / expected for k, expected in common.items())
    chi += (sum(n for k, n in seen.items() if k not in common) - rare) ** 2 / rare
    freedom = len(common)
    assert chi < freedom + 4 * math.sqrt(2 * freedom)
    # And one epsilon apart: no neighbouring counts are told apart by more than e^epsilon.
    values = sorted(law)
    assert all(abs(math.log(law[a] / law[b])) <= epsilon + 1e-9 for a, b in itertools.pairwise(values))


def test_the_noise_does_not_depend_on_the_counts() -> None:
    added = [np.subtract(noised_counts([n] * 40, KEY, 1.0, RUN, 0), n) for n in (1_000, 5_000)]
    assert added[0].tolist() == added[1].tolist() == draws(40).tolist()


def test_counts_stay_within_what_a_manifest_may_say() -> None:
    low, high = noised_counts([0] * 50, KEY, 0.1, RUN, 0), noised_counts([COUNT_LIMIT - 1] * 50, KEY, 0.1, RUN, 0)
    assert min(low) == 0 < max(low)
    assert min(high) < max(high) == COUNT_LIMIT - 1
    for epsilon in (5e-324, 1e-300, 1e-12, 1e300):
        for counts in ([0] * 20, [10] * 20):
            publishable(
                ClassStatistics(counts=tuple(counts), hits=tuple(counts), predicted=tuple(counts)),
                noised_counts(counts, KEY, epsilon, RUN, 0),
            )
    assert noised_counts([0, 7], KEY, 1e300, RUN, 0) == (0, 7)


# ------------------------------------------------------------------------------------------------- what is published

N = st.integers(0, 1000)
CLASS = st.tuples(N, N, N, N).map(lambda t: (max(t[0], t[1]), min(t[0], t[1]), t[2], t[3]))  # n, h <= n, p, n'


@given(st.lists(CLASS, min_size=1, max_size=5))
def test_what_is_published_is_consistent_and_keeps_the_accuracy(classes: list[tuple[int, int, int, int]]) -> None:
    n, h, p, noised = zip(*classes, strict=True)
    published = publishable(ClassStatistics(counts=n, hits=h, predicted=p), noised)  # h' <= n', or it is refused
    assert published.counts == noised
    for true_n, true_h, n_, h_ in zip(n, h, noised, published.hits, strict=True):
        if true_n == 0 or n_ == 0:
            assert h_ == 0
        else:
            assert abs(h_ * true_n - true_h * n_) * 2 <= true_n  # |h'/n' - h/n| <= 1/(2n')
            assert h_ == n_ if true_h == true_n else True


def test_predictions_say_nothing_that_the_noised_counts_do_not() -> None:
    noised = (4, 0, 9)
    one, two = (ClassStatistics(counts=(5, 5, 5), hits=(1, 2, 3), predicted=p) for p in ((5, 5, 5), (15, 0, 0)))
    assert publishable(one, noised) == publishable(two, noised)
    assert publishable(one, noised).predicted == noised


# ----------------------------------------------------------------------------------------------------------- whole runs


def federation(epsilon: float | None = 1.0, **fields: Any) -> Federation:
    return build_federation(
        {
            "federation": "tiny",
            "rounds": 2,
            "data": {"dataset": "digits", "samples": 240, "holdout": 0.4},
            "training": {"batch_size": 32, "evaluate_every": 10},
            "privacy": {} if epsilon is None else {"count_epsilon": epsilon},
            "peers": [{"id": peer, "address": f"host:{peer + 1}", "arch": "cnn6@0.125"} for peer in KEYS],
            **fields,
        },
        "test",
    )


def dataset_of(settings: Federation) -> Dataset:
    return load_dataset(settings.data, seed=settings.seed, data_dir=Path())


def true_counts(settings: Federation) -> dict[int, tuple[int, ...]]:
    labels = dataset_of(settings).train.labels
    splits = make_splits(labels, settings.data, settings.ids, settings.seed)
    return {peer: tuple(np.bincount(labels[split.validation], minlength=10).tolist()) for peer, split in splits.items()}


def expected_counts(settings: Federation, keys: dict[int, bytes] = KEYS) -> dict[int, tuple[int, ...]]:
    epsilon = settings.privacy.count_epsilon
    assert epsilon is not None
    run = settings.digest()
    return {peer: noised_counts(n, keys[peer], epsilon, run, peer) for peer, n in true_counts(settings).items()}


class Watched:
    """A simulation, with all manifests that teachers came with and all that the aggregation was given."""

    def __init__(self, settings: Federation, keys: dict[int, bytes] | None) -> None:
        self.taught: list[Manifest] = []
        self.aggregated: set[tuple[tuple[int, ...], ...]] = set()
        teach = Client.teach

        def watched_teach(student: Client, manifest: Manifest, snapshot: bytes) -> None:
            self.taught.append(manifest)
            teach(student, manifest, snapshot)

        def watched_aggregate(q: torch.Tensor, counts: torch.Tensor, *rest: Any, **options: Any) -> Aggregation:
            self.aggregated.add(tuple(map(tuple, counts.tolist())))
            return aggregate(q, counts, *rest, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Client, "teach", watched_teach)
            patch.setattr(backbone, "aggregate", watched_aggregate)
            self.summary, self.history = simulate(
                settings, dataset_of(settings), device=CPU, threads=1, count_keys=keys
            )

    def digests(self) -> dict[tuple[int, int], str]:
        return {(record.round, record.peer): record.snapshot_sha256 for record in self.history}


@pytest.fixture(scope="module")
def noised() -> Watched:
    return Watched(federation(), KEYS)


@pytest.fixture(scope="module")
def plain() -> Watched:
    return Watched(federation(None), KEYS)


def test_all_that_leaves_a_peer_has_the_noised_counts_in_every_round(noised: Watched) -> None:
    expected, true = expected_counts(federation()), true_counts(federation())
    assert all(expected[peer] != true[peer] for peer in KEYS)  # else this test shows nothing
    assert {(m.peer, m.round) for m in noised.taught} == {(peer, number) for peer in KEYS for number in (0, 1)}
    for manifest in noised.taught:
        assert manifest.statistics.counts == manifest.statistics.predicted == expected[manifest.peer]
    assert {result.id: result.counts for result in noised.summary.peers} == expected
    best = noised.summary.best_round
    for result in noised.summary.peers:
        (record,) = (r for r in noised.history if (r.peer, r.round) == (result.id, best))
        assert record.validation_accuracy == sum(result.hits) / sum(result.counts)


def test_filter_and_weights_see_the_noised_counts(noised: Watched, plain: Watched) -> None:
    expected = expected_counts(federation())
    assert noised.aggregated == {tuple(expected[j] for j in KEYS if j != i) for i in KEYS}
    true = true_counts(federation())
    assert plain.aggregated == {tuple(true[j] for j in KEYS if j != i) for i in KEYS}
    changed = {key for key, digest in noised.digests().items() if digest != plain.digests()[key]}
    assert changed == set(noised.digests())


def test_a_class_whose_count_the_noise_takes_away_is_not_supported() -> None:
    q = torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]], [[0.3, 0.7]]])
    measured = ClassStatistics(counts=(2, 2), hits=(1, 1), predicted=(2, 2))
    published = [publishable(measured, counts) for counts in ((0, 5), (1, 5), (3, 5))]
    counts, hits = (torch.tensor([getattr(s, name) for s in published]) for name in ("counts", "hits"))
    assert aggregate(q, counts, hits).kept[:, 0, 0].tolist() == [False, False, True]


def test_without_the_section_nothing_changes(plain: Watched) -> None:
    assert build_federation({**federation(None).model_dump(mode="json")}, "test") == federation(None)
    assert federation(None).agreed()["privacy.count_epsilon"] is None
    true = true_counts(federation(None))
    assert all(m.statistics.counts == true[m.peer] for m in plain.taught)
    # Noise that rounds to zero goes all the way of the noise, and changes no byte of a model.
    silent = Watched(federation(1e6), KEYS)
    assert silent.digests() == plain.digests()
    assert [p.hits for p in silent.summary.peers] == [p.hits for p in plain.summary.peers]
    assert any(m.statistics.predicted != true[m.peer] for m in plain.taught)


def test_a_simulation_draws_secrets_of_its_own_unless_it_is_given_some(noised: Watched) -> None:
    def counts(keys: dict[int, bytes] | None) -> list[tuple[int, ...]]:
        summary: Summary
        history: list[RoundRecord]
        settings = federation(rounds=1)
        summary, history = simulate(settings, dataset_of(settings), device=CPU, threads=1, count_keys=keys)
        assert len(history) == 3
        return [peer.counts for peer in summary.peers]

    assert counts(KEYS) == counts(KEYS) == list(expected_counts(federation(rounds=1)).values())
    assert counts(None) != counts(None)
    assert counts(KEYS) != [peer.counts for peer in noised.summary.peers]  # another run, another draw


@pytest.mark.parametrize("value", [0, -1, "much", math.inf, math.nan, True])
def test_an_epsilon_that_is_none(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"privacy\.count_epsilon"):
        federation(value)


# --------------------------------------------------------------------------------------------------- client and learner


def client_of(settings: Federation, folder: Path, key: bytes | None) -> Client:
    data = dataset_of(settings)
    split = make_splits(data.train.labels, settings.data, settings.ids, settings.seed)[0]
    return Client(settings, 0, data, split, device=CPU, folder=folder, count_key=key)


def test_a_client_says_the_same_counts_after_a_restart_also_without_its_secret(tmp_path: Path) -> None:
    settings = federation(method={"name": "local"})
    first = client_of(settings, tmp_path / "first", KEY)
    first.initialise()
    expected = noised_counts(true_counts(settings)[0], KEY, 1.0, settings.digest(), 0)
    assert first.validate().counts == expected
    files = first.snapshot(), first.checkpoint()
    for name, key, counts in (("same", KEY, None), ("lost", None, expected), ("other", bytes(KEY_BYTES), expected)):
        again = client_of(settings, tmp_path / name, key)
        again.restore(0, *files, counts)
        assert again.validate() == first.validate()
        again.open_round()
        again.train([], lambda: files)
        assert again.validate().counts == expected


def test_a_client_without_a_secret_publishes_nothing(tmp_path: Path) -> None:
    client = client_of(federation(), tmp_path, None)
    client.initialise()
    with pytest.raises(RuntimeError, match="no secret"):
        client.validate()


def learner(folder: Path, *options: str) -> tuple[Learner, io.StringIO]:
    events = io.StringIO()
    arguments = argparse.Namespace(
        id=0,
        peers=folder / "peers.yaml",
        data_dir=None,
        download=False,
        scratch=folder / "scratch",
        device="cpu",
        precision="auto",
        count_key=folder / options[0] if options else None,
    )
    return Learner(load_federation(arguments.peers), arguments, events), events


def test_the_learner_reports_noised_counts_only(tmp_path: Path) -> None:
    federation_file(tmp_path, privacy={"count_epsilon": 0.2})
    create_key(tmp_path / KEY_FILE)
    (tmp_path / "round").mkdir()
    first, events = learner(tmp_path, KEY_FILE)
    first.carry_out({"do": "initialise", "folder": str(tmp_path / "round")})
    said = json.loads(events.getvalue().splitlines()[-1])["statistics"]
    settings = load_federation(tmp_path / "peers.yaml")
    key = (tmp_path / KEY_FILE).read_bytes()
    assert tuple(said["counts"]) == expected_counts(settings, {0: key})[0]
    again, events = learner(tmp_path)  # the key is lost, and the last round is here
    folder = str(tmp_path / "round")
    again.carry_out({"do": "restore", "round": 0, "folder": folder, "counts": said["counts"]})
    again.carry_out({"do": "open"})
    again.carry_out({"do": "train", "teachers": [], "last": folder, "folder": folder})
    assert json.loads(events.getvalue().splitlines()[-1])["statistics"]["counts"] == said["counts"]


# ----------------------------------------------------------------------------------------------------------- the secret


def test_a_secret_is_made_whole_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / KEY_FILE
    path.with_name(KEY_FILE + ".partial").write_bytes(b"half")  # a killed process left it
    synced: list[bool] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(path.exists()), fsync(fd)))
    before = os.umask(0)
    try:
        create_key(path)
    finally:
        os.umask(before)
    assert synced == [False, True]  # the bytes before the name, the name after it
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    key = load_key(path)
    assert len(key) == KEY_BYTES
    with pytest.raises(FileExistsError):
        create_key(path)
    assert load_key(path) == key


def test_a_disk_that_fails_leaves_no_part_of_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            create_key(tmp_path / KEY_FILE)
    assert not (tmp_path / KEY_FILE).exists()
    create_key(tmp_path / KEY_FILE)


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        (bytes(31), 0o600, r"has 31 bytes, and must be a file of 32 random bytes: put back a copy, or remove it"),
        (b"", 0o600, r"has 0 bytes"),
        (bytes(33), 0o600, r"has 33 bytes"),
        (None, 0o700, r"is no file, and must be a file of 32"),
        (bytes(32), 0o644, r"has mode 0644, and must be for its owner alone \(0600\).* run 'chmod 600 .*"),
        (bytes(32), 0o620, r"has mode 0620"),
    ],
)
def test_a_secret_that_must_not_be_used(tmp_path: Path, content: bytes | None, mode: int, sentence: str) -> None:
    path = tmp_path / KEY_FILE
    path.mkdir() if content is None else path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        load_key(path)
    assert str(path) in str(caught.value)


# -------------------------------------------------------------------------------------------------------- real services


def published(state: Path) -> set[tuple[int, ...]]:
    counts = set()
    for path in state.glob("rounds/[0-9]*/manifest.json"):
        statistics = Manifest.from_bytes(path.read_bytes()).statistics
        assert statistics.counts == statistics.predicted
        counts.add(statistics.counts)
    return counts


def test_a_real_peer_keeps_its_counts_when_it_is_killed_and_when_its_secret_is_lost(
    tmp_path: Path, start: Callable[..., Peer]
) -> None:
    path = federation_file(tmp_path, rounds=400, privacy={"count_epsilon": 0.2})
    settings = load_federation(path)
    first = start("--id", "0", "--peers", str(path))
    first.reach(1)
    first.kill()
    key = load_key(first.state / KEY_FILE)
    expected = {expected_counts(settings, {0: key})[0]}
    assert published(first.state) == expected != {true_counts(settings)[0]}
    reached = first.last_round()
    again = start("--id", "0", "--peers", str(path))
    again.reach(reached + 3)
    again.stop()
    assert load_key(first.state / KEY_FILE) == key
    assert published(first.state) == expected
    (first.state / KEY_FILE).unlink()
    reached = first.last_round()
    again = start("--id", "0", "--peers", str(path))
    again.reach(reached + 3)
    again.stop()
    assert not (first.state / KEY_FILE).exists()
    assert published(first.state) == expected


def test_a_peer_that_lost_its_disk_draws_no_second_secret(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=6, privacy={"count_epsilon": 1.0})
    (other,), _ = stopped_at(peers, 3)
    state = peers.state(1)
    assert stat.S_IMODE((state / KEY_FILE).stat().st_mode) == 0o600
    state.rename(state.with_name("lost"))
    back = peers.start(1, "--recover")
    back.says(rf"{KEY_FILE} is not there; the class counts stay those that this peer has published")
    peers.tell("hold", None)
    assert (back.ended(20), other.ended(20)) == (0, 0)
    assert not (state / KEY_FILE).exists()


def test_a_lost_disk_is_told_before_a_secret_is_drawn_anew(mesh: Callable[..., Peers]) -> None:
    peers = mesh(2, rounds=6, privacy={"count_epsilon": 1.0})
    stopped_at(peers, 3)
    peers.state(1).rename(peers.folder / "lost")
    refused = peers.start(1)
    assert refused.ended(20) == ExitCode.INCOMPLETE, refused.output
    assert "peer 0 has had round 3 of this peer" in refused.last_words()
    assert not (peers.state(1) / KEY_FILE).exists()
    assert "INFO    noise of scale 1/1 is on the class counts that are published" in refused.output


def test_a_check_says_that_there_is_noise() -> None:
    said = describe_federation(federation(), 0).sentence
    assert "noise of scale 1/1 is on the class counts" in said
    assert "everybody can compute the true ones" in said
    assert "noise" not in describe_federation(federation(None), 0).sentence


def test_a_secret_that_others_may_read_ends_the_peer(mesh: Callable[..., Peers]) -> None:
    peers = mesh(1, privacy={"count_epsilon": 1.0})
    peers.state(0).mkdir()
    (peers.state(0) / KEY_FILE).write_bytes(KEY)
    (peers.state(0) / KEY_FILE).chmod(0o640)
    refused = peers.start(0)
    assert refused.ended(20) == 3
    assert f"{KEY_FILE} has mode 0640" in refused.last_words()
    assert refused.last_round() == -1


def test_without_noise_there_is_no_secret(mesh: Callable[..., Peers]) -> None:
    peers = mesh(1, rounds=1)
    only = peers.start(0)
    assert only.ended(20) == 0
    assert not (only.state / KEY_FILE).exists()
