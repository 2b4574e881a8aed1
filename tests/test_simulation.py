"""Whole runs in one process: equal bytes from equal settings, restarts that leave no trace, and what is reported."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crad_p2p import weights
from crad_p2p.architectures import build_model
from crad_p2p.client import Client
from crad_p2p.data import shards
from crad_p2p.data.datasets import Dataset, load_dataset
from crad_p2p.data.partition import Split, make_splits
from crad_p2p.errors import ReservationsError
from crad_p2p.federation import Federation, build_federation
from crad_p2p.frozen import supports
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.randomness import generator, torch_seed
from crad_p2p.results import PeerResult, RoundRecord, Seconds, Summary
from crad_p2p.simulation import simulate
from crad_p2p.snapshot import SnapshotError
from launch.cli import simulate as command

CPU = torch.device("cpu")
ARCHS = {7: "cnn6@0.125", 0: "resnet18@0.125", 3: "resnet18-half@0.125"}  # ids neither dense nor in order
IDS = (0, 3, 7)


def federation(**fields: Any) -> Federation:
    return build_federation(
        {
            "federation": "tiny",
            "rounds": 2,
            "data": {"dataset": "digits", "samples": 300, "holdout": 0.4},
            "training": {"batch_size": 32, "evaluate_every": 1},
            "peers": [{"id": peer, "address": f"host:{peer + 1}", "arch": arch} for peer, arch in ARCHS.items()],
            **fields,
        },
        "test",
    )


def dataset_of(settings: Federation) -> Dataset:
    return load_dataset(settings.data, seed=settings.seed, data_dir=Path())


def run(settings: Federation, **options: Any) -> tuple[Summary, list[RoundRecord]]:
    return simulate(settings, dataset_of(settings), device=CPU, threads=1, **options)


def digests(history: Sequence[RoundRecord]) -> dict[tuple[int, int], str]:
    return {(record.round, record.peer): record.snapshot_sha256 for record in history}


Run = tuple[Summary, list[RoundRecord]]


@pytest.fixture(scope="module")
def base() -> Run:
    return run(federation())


# ------------------------------------------------------------------------------------------------ partial participation


def test_all_peers_drawn_in_every_round_give_the_bytes_of_a_run_without_a_draw(base: Run) -> None:
    summary, history = run(federation(participation=3))
    assert digests(history) == digests(base[1])
    assert summary.best_round == base[0].best_round
    assert summary.config_digest != base[0].config_digest


def test_those_that_are_drawn_learn_from_one_another_and_the_others_stay_as_they_are() -> None:
    settings = federation(participation=2, rounds=4)
    summary, history = run(settings)
    assert [(record.round, record.peer) for record in history] == [
        (number, peer) for number in range(1, 5) for peer in settings.active(number)
    ]
    for record in history:
        assert record.teachers == tuple(j for j in settings.active(record.round) if j != record.peer)
    for result in summary.peers:
        own = [record for record in history if record.peer == result.id]
        assert result.rounds_completed == 4
        assert result.snapshot_sha256 == own[-1].snapshot_sha256
    assert len(set(digests(history).values())) == 8


# --------------------------------------------------------------------------------------------------------- reproducible


def test_equal_settings_give_equal_bytes_whatever_the_global_generators(base: Run) -> None:
    torch.manual_seed(99)
    np.random.seed(99)
    torch.rand(3)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()
    summary, history = run(federation())
    assert torch.equal(torch.get_rng_state(), before)
    numpy_after = np.random.get_state()
    assert all(np.array_equal(a, b) for a, b in zip(numpy_before, numpy_after, strict=True))
    assert digests(history) == digests(base[1])
    assert len(set(digests(history).values())) == 2 * 3
    for one, two in zip(summary.peers, base[0].peers, strict=True):
        timeless = {"seconds": Seconds(), "peak_rss_bytes": 0}
        assert {**vars(one), **timeless} == {**vars(two), **timeless}


def test_workers_change_nothing(base: Run) -> None:
    assert digests(run(federation(), workers=2)[1]) == digests(base[1])


def test_every_worker_has_the_threads_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    validate = Client.validate

    def spied(client: Client) -> ClassStatistics:
        seen.add(torch.get_num_threads())
        return validate(client)

    monkeypatch.setattr(Client, "validate", spied)
    settings = federation(rounds=1)
    simulate(settings, dataset_of(settings), device=CPU, threads=2, workers=2)
    assert seen == {2}
    assert torch.get_num_threads() == 1  # of this thread


def test_another_seed_gives_another_run(base: Run) -> None:
    other = digests(run(federation(seed=1025, rounds=1))[1])
    assert not set(other.values()) & set(digests(base[1]).values())


@pytest.mark.parametrize(
    "change",
    [
        {"method": {"name": "uniform"}},
        {"method": {"name": "stage1"}},
        {"method": {"name": "uncertainty"}},
        {"method": {"temperature": 2.0}},
        {"method": {"distillation_weight": 0.5}},
        {"method": {"min_support": 5}},
        {"training": {"batch_size": 32, "learning_rate": 0.02}},
        {"training": {"batch_size": 32, "weight_decay": 0.0}},
        {"training": {"batch_size": 32, "clip_norm": 0.01}},
        {"training": {"batch_size": 16}},
        {"data": {"dataset": "digits", "samples": 300, "holdout": 0.4, "augmentation": "none"}},
    ],
    ids=str,
)
def test_every_setting_reaches_the_training(base: Run, change: dict[str, Any]) -> None:
    other = digests(run(federation(rounds=1, **change))[1])
    assert other.keys() == {(1, peer) for peer in IDS}
    assert any(other[key] != digests(base[1])[key] for key in other)


def test_momentum_reaches_the_second_round(base: Run) -> None:
    other = digests(run(federation(training={"batch_size": 32, "momentum": 0.0}))[1])
    assert other[2, 0] != digests(base[1])[2, 0]


# ------------------------------------------------------------------------------------------- the same, client by client


def never() -> tuple[bytes, bytes]:
    """The last good round, of tests in which training must not diverge."""
    pytest.fail("training diverged")


class Mesh:
    """The clients of a federation driven by hand, one synchronous round after the other."""

    def __init__(self, settings: Federation, folder: Path) -> None:
        self.settings = settings
        self.dataset = dataset_of(settings)
        self.splits = make_splits(self.dataset.train.labels, settings.data, settings.ids, settings.seed)
        self.folder = folder
        self.clients = {peer: self.client(peer) for peer in settings.ids}

    def client(self, peer: int, name: str = "first") -> Client:
        folder = self.folder / name / str(peer)
        return Client(self.settings, peer, self.dataset, self.splits[peer], device=CPU, folder=folder)

    def publish(self) -> dict[int, tuple[Manifest, bytes]]:
        published = {}
        for peer, client in self.clients.items():
            snapshot = client.snapshot()
            manifest = Manifest(
                run="0" * 64,
                peer=peer,
                round=client.round,
                arch=ARCHS[peer],
                size=len(snapshot),
                sha256=hashlib.sha256(snapshot).hexdigest(),
                statistics=client.validate(),
                consumed=(),
                model_round=client.round,
                missing=(),
                quarantined=(),
            )
            published[peer] = (manifest, snapshot)
        return published

    def one_round(self, client: Client, published: dict[int, tuple[Manifest, bytes]]) -> bytes:
        others = [peer for peer in published if peer != client.id]
        client.open_round()
        for peer in reversed(others):
            client.teach(*published[peer])
        client.train(others, never)
        return client.snapshot()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Mesh:
    """Two rounds done; each client's snapshots and checkpoints by round."""
    mesh = Mesh(federation(), tmp_path_factory.mktemp("mesh"))
    for client in mesh.clients.values():
        client.initialise()
    return mesh


Stored = dict[int, dict[int, tuple[bytes, bytes]]]


@pytest.fixture(scope="module")
def stored(mesh: Mesh) -> tuple[Stored, list[dict[int, tuple[Manifest, bytes]]]]:
    published = [mesh.publish()]
    files: Stored = {0: {peer: (client.snapshot(), client.checkpoint()) for peer, client in mesh.clients.items()}}
    for number in (1, 2):
        files[number] = {}
        for peer, client in mesh.clients.items():
            files[number][peer] = (mesh.one_round(client, published[-1]), client.checkpoint())
        published.append(mesh.publish())
    return files, published


Files = tuple[Stored, list[dict[int, tuple[Manifest, bytes]]]]


def test_the_simulation_is_the_clients_taught_by_the_round_before(base: Run, stored: Files) -> None:
    by_hand = {
        (number, peer): hashlib.sha256(snapshot).hexdigest()
        for number in (1, 2)
        for peer, (snapshot, _) in stored[0][number].items()
    }
    assert by_hand == digests(base[1])


@pytest.mark.parametrize("number", [0, 1])
def test_a_restart_leaves_no_trace(mesh: Mesh, stored: Files, number: int) -> None:
    files, published = stored
    for peer in IDS:
        client = mesh.client(peer, f"restart{number}")
        client.restore(number, *files[number][peer])
        assert client.round == number
        assert client.snapshot() == files[number][peer][0]
        assert client.checkpoint() == files[number][peer][1]
        assert mesh.one_round(client, published[number]) == files[number + 1][peer][0]
        assert client.checkpoint() == files[number + 1][peer][1]
        assert client.round == number + 1


def test_the_checkpoint_matters(mesh: Mesh, stored: Files) -> None:
    files, published = stored
    client = mesh.client(0, "without")
    client.restore(1, files[1][0][0], files[0][0][1])
    assert mesh.one_round(client, published[1]) != files[2][0][0]


def test_restoring_forgets_what_came_after(mesh: Mesh, stored: Files) -> None:
    files, published = stored
    client = mesh.client(3, "again")
    client.restore(0, *files[0][3])
    for _ in range(2):
        assert mesh.one_round(client, published[0]) == files[1][3][0]
        client.restore(0, *files[0][3])


def test_files_that_are_damaged_are_not_restored(mesh: Mesh, stored: Files) -> None:
    snapshot, checkpoint = stored[0][1][0]
    tensors = weights.decode(snapshot)
    tensors["classifier.bias"][0] = float("nan")
    for pair in ((snapshot[:-1], checkpoint), (snapshot, checkpoint[:-1]), (weights.encode(tensors), checkpoint)):
        with pytest.raises(SnapshotError):
            mesh.client(0, "bad").restore(1, *pair)


def test_another_architectures_files_are_not_restored(mesh: Mesh, stored: Files) -> None:
    mine, others, start = (stored[0][number][peer] for number, peer in ((1, 0), (1, 7), (0, 0)))
    momentum = weights.decode(mine[1])
    fewer = weights.encode({name: momentum[name] for name in sorted(momentum)[1:]})
    reshaped = weights.encode({name: value.unsqueeze(0) for name, value in momentum.items()})
    client = mesh.client(0, "bad")
    client.restore(0, *start)
    with pytest.raises(SnapshotError, match=r"snapshot of round 1 is not of resnet18@0\.125"):
        client.restore(1, others[0], mine[1])
    for checkpoint in (others[1], mine[0], fewer, reshaped):
        with pytest.raises(SnapshotError, match=r"checkpoint of round 1 is not of resnet18@0\.125"):
            client.restore(1, mine[0], checkpoint)
    assert client.round == 0
    client.restore(1, *mine)
    assert (client.snapshot(), client.checkpoint()) == mine


def test_start_values_are_the_peers_own(stored: Files) -> None:
    assert len({snapshot for snapshot, _ in stored[0][0].values()}) == 3
    same = {**{"id": 1, "address": "a:1", "arch": "cnn6@0.125"}}
    settings = federation(peers=[same, {**same, "id": 2, "address": "a:2"}])
    mesh = Mesh(settings, Path("unused"))
    for client in mesh.clients.values():
        client.initialise()
    assert mesh.clients[1].snapshot() != mesh.clients[2].snapshot()


def accuracy_counts(settings: Federation, snapshot: bytes, indices: np.ndarray | None) -> ClassStatistics:
    """Statistics by hand: one pass in eval mode over samples as they are."""
    data = dataset_of(settings)
    part = data.test if indices is None else data.train
    images, labels = (part.images, part.labels) if indices is None else (part.images[indices], part.labels[indices])
    model = build_model(ARCHS[0], classes=10, channels=1)
    model.load_state_dict(weights.decode(snapshot))
    model.eval()
    with torch.no_grad():
        guess = model((torch.from_numpy(images).float() / 255 - 0.5) / 0.5).argmax(1).numpy()
    return ClassStatistics(
        counts=tuple(int((labels == c).sum()) for c in range(10)),
        hits=tuple(int(((labels == c) & (guess == c)).sum()) for c in range(10)),
        predicted=tuple(int((guess == c).sum()) for c in range(10)),
    )


def test_validation_and_evaluation_are_in_eval_mode_on_their_own_samples(mesh: Mesh, stored: Files) -> None:
    files, published = stored
    settings, split = mesh.settings, mesh.splits[0]
    for number in (0, 1, 2):
        assert published[number][0][0].statistics == accuracy_counts(settings, files[number][0][0], split.validation)
    client = mesh.clients[0]
    client.model.train()
    client.validate()
    assert client.snapshot() == files[2][0][0]  # looking does not change the running statistics
    evaluation = client.evaluate(files[1][0][0])  # of the snapshot given, not of the model as it is
    everywhere = accuracy_counts(settings, files[1][0][0], None)
    assert evaluation.global_accuracy == everywhere.accuracy
    assert evaluation.global_accuracy_per_class == tuple(
        h / n if n else None for h, n in zip(everywhere.hits, everywhere.counts, strict=True)
    )
    assert evaluation.local_accuracy == accuracy_counts(settings, files[1][0][0], split.test).accuracy
    assert client.snapshot() == files[2][0][0]


@pytest.mark.skipif(not supports(torch.bfloat16, CPU), reason="this machine's libraries have no fast bfloat16")
def test_teachers_alone_compute_in_another_precision(base: Run, mesh: Mesh, stored: Files, tmp_path: Path) -> None:
    summary, history = run(federation(), precision=torch.bfloat16)
    assert {peer.teacher_precision for peer in summary.peers} == {"bfloat16"}
    same = digests(history).items() & digests(base[1]).items()
    assert not same
    by_round = [[record.target_top1 for record in each if record.round == 1] for each in (history, base[1])]
    assert by_round[0] == pytest.approx(by_round[1], abs=0.05)
    rough = Client(
        mesh.settings,
        0,
        dataset_of(mesh.settings),
        mesh.splits[0],
        device=CPU,
        precision=torch.bfloat16,
        folder=tmp_path,
    )
    snapshot = stored[0][1][0][0]
    assert rough.evaluate(snapshot) == mesh.clients[0].evaluate(snapshot)  # accuracies are always of float32
    logits = [client._frozen(ARCHS[0], snapshot, torch.float32) for client in (rough, mesh.clients[0])]
    pixels = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits[0](pixels), logits[1](pixels))


# ----------------------------------------------------------------------------------------------------------- the report


def test_one_record_a_client_and_round_in_order(base: Run) -> None:
    seen: list[tuple[int, list[RoundRecord]]] = []
    _, history = run(federation(), on_round=lambda number, records: seen.append((number, list(records))))
    assert [(record.round, record.peer) for record in history] == [(r, p) for r in (1, 2) for p in IDS]
    assert [(number, [record.peer for record in records]) for number, records in seen] == [
        (1, list(IDS)),
        (2, list(IDS)),
    ]
    for record in base[1]:
        assert record.teachers == tuple(peer for peer in IDS if peer != record.peer)
        assert record.train_loss is not None
        assert record.train_loss > 0
        for share in (record.target_collapsed, record.target_top1, record.global_accuracy):
            assert share is not None
            assert 0 <= share <= 1
        assert record.target_mass == pytest.approx(1, abs=0.3)  # with two teachers hardly any is lost
        assert record.missing_teachers == record.stale_teachers == record.quarantined_teachers == ()
        assert min(record.seconds.teachers, record.seconds.train, record.seconds.validate) > 0
        assert (record.bytes_sent, record.bytes_received) == (0, 0)


def test_validation_accuracies_are_those_of_the_manifests(base: Run, stored: Files) -> None:
    for record in base[1]:
        manifest, _ = stored[1][record.round][record.peer]
        assert record.validation_accuracy == manifest.statistics.accuracy


def test_the_summary(base: Run, stored: Files) -> None:
    settings = federation()
    summary, history = base
    assert (summary.federation, summary.config_digest, summary.method) == ("tiny", settings.digest(), "crad")
    assert (summary.transport, summary.rounds, summary.complete) == ("memory", 2, True)
    assert summary.wall_seconds > 0
    by_round = {
        number: np.mean([record.validation_accuracy for record in history if record.round == number])
        for number in (1, 2)
    }
    assert summary.best_round == max(by_round, key=lambda number: by_round[number])
    assert [peer.id for peer in summary.peers] == list(IDS)
    for peer in summary.peers:
        assert isinstance(peer, PeerResult)
        manifest, _ = stored[1][summary.best_round][peer.id]
        (best,) = [r for r in history if r.peer == peer.id and r.round == summary.best_round]
        (last,) = [r for r in history if r.peer == peer.id and r.round == 2]
        assert peer.arch == ARCHS[peer.id]
        assert peer.rounds_completed == 2
        assert peer.snapshot_sha256 == last.snapshot_sha256
        assert (peer.counts, peer.hits) == (manifest.statistics.counts, manifest.statistics.hits)
        assert peer.global_accuracy == best.global_accuracy
        assert len(peer.global_accuracy_per_class) == 10
        assert peer.seconds.train == pytest.approx(sum(r.seconds.train for r in history if r.peer == peer.id))
        assert peer.peak_rss_bytes > 2**24
        assert peer.missing_teachers == peer.stale_teachers == peer.quarantined_teachers == ()
        assert peer.teacher_precision == "float32"
    split = make_splits(dataset_of(settings).train.labels, settings.data, IDS, settings.seed)
    assert [peer.train_samples for peer in summary.peers] == [len(split[peer].train) for peer in IDS]
    for field in ("global_accuracy", "local_accuracy"):
        values = [getattr(peer, field) for peer in summary.peers]
        assert getattr(summary, f"mean_{field}") == pytest.approx(np.mean(values))


def test_the_best_round_may_be_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(client: Client) -> ClassStatistics:
        hits = (9, 5, 8, 7)[client.round]  # round 0 does not count
        return ClassStatistics(counts=(9 + client.round,) * 10, hits=(hits,) * 10, predicted=(0,) * 10)

    monkeypatch.setattr(Client, "validate", claim)
    summary, history = run(federation(rounds=3))
    assert summary.best_round == 2
    for peer in summary.peers:
        (best,) = [r for r in history if r.peer == peer.id and r.round == 2]
        (last,) = [r for r in history if r.peer == peer.id and r.round == 3]
        assert peer.global_accuracy == best.global_accuracy
        assert peer.snapshot_sha256 == last.snapshot_sha256
        assert (peer.counts, peer.hits) == ((11,) * 10, (8,) * 10)
    assert any(r.global_accuracy != p.global_accuracy for p, r in zip(summary.peers, history[-3:], strict=True))


def test_local_learning_has_no_teachers(base: Run) -> None:
    summary, history = run(federation(method={"name": "local"}))
    assert summary.method == "local"
    for record in history:
        assert record.teachers == ()
        assert record.target_mass is record.target_collapsed is record.target_top1 is None
        assert record.train_loss is not None
    assert not set(digests(history).values()) & set(digests(base[1]).values())


def test_warm_up_rounds_have_no_teachers_either() -> None:
    _, history = run(federation(method={"warmup_rounds": 1}))
    for record in history:
        assert (record.teachers == ()) == (record.round == 1)
        assert (record.target_mass is None) == (record.round == 1)
    local = digests(run(federation(method={"name": "local"}, rounds=1))[1])
    assert local == {key: value for key, value in digests(history).items() if key[0] == 1}


def test_the_global_test_set_is_used_when_due() -> None:
    _, history = run(federation(rounds=3, training={"batch_size": 32, "evaluate_every": 2}))
    assert {r.round: r.global_accuracy is not None for r in history} == {1: False, 2: True, 3: True}


def test_shards_that_hardly_teach_anything_do_not_stop_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer without any sample, one with one class only, one whose last batch is a single image."""
    data = dataset_of(federation())
    ones, nothing = np.flatnonzero(data.train.labels == 1), np.arange(0)
    splits = {
        0: Split(nothing, nothing, nothing),
        3: Split(ones[:9], ones[9:14], ones[14:17]),
        7: Split(np.arange(33), np.arange(33, 60), np.arange(60, 80)),
    }
    monkeypatch.setattr(shards, "make_splits", lambda *_: splits)
    summary, history = run(federation())
    assert [(record.round, record.peer) for record in history] == [(r, p) for r in (1, 2) for p in IDS]
    for record in history:
        assert len(record.teachers) == 2
        assert record.quarantined_teachers == ()  # what the others publish can still be used
        assert record.redone == 0
        if record.peer:
            assert record.train_loss is not None
            assert np.isfinite(record.train_loss)
        else:
            assert record.train_loss is record.validation_accuracy is record.target_mass is None
    by_peer = {peer.id: peer for peer in summary.peers}
    assert digests(history)[1, 0] == digests(history)[2, 0] == by_peer[0].snapshot_sha256  # nothing learned, no harm
    assert (by_peer[0].train_samples, by_peer[0].local_accuracy) == (0, None)
    assert by_peer[0].counts == (0,) * 10
    assert by_peer[3].counts == (0, 5, *(0,) * 8)
    assert by_peer[7].train_samples == 33
    assert summary.mean_local_accuracy == pytest.approx(np.mean([by_peer[i].local_accuracy for i in (3, 7)]))
    assert all(peer.global_accuracy is not None for peer in summary.peers)


def test_no_scratch_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used: list[int] = []
    run(federation(rounds=1), on_round=lambda _number, _records: used.append(len(list(tmp_path.iterdir()))))
    assert used == [1]
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- the generators


def test_draws_depend_on_seed_peer_round_and_purpose() -> None:
    arguments = [
        (1, "a", None, None),
        (2, "a", None, None),
        (1, "b", None, None),
        (1, "a", 0, None),
        (1, "a", 1, None),
        (1, "a", None, 0),
        (1, "a", None, 1),
        (1, "a", 1, 1),
        (1, "a", 11, None),
        (11, "a", 1, 1),
    ]
    draws, seeds = set(), set()
    for seed, purpose, peer, number in arguments:
        draw = generator(seed, purpose, peer=peer, round_number=number).integers(2**63)
        assert draw == generator(seed, purpose, peer=peer, round_number=number).integers(2**63)
        draws.add(int(draw))
        seeds.add(torch_seed(seed, purpose, peer=peer, round_number=number))
    assert len(draws) == len(seeds) == len(arguments)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_draws_are_the_same_on_every_machine() -> None:
    assert generator(1024, "local epoch", peer=3, round_number=7).integers(10**6, size=3).tolist() == [
        576922,
        997070,
        982488,
    ]
    assert torch_seed(1024, "initial model", peer=3) == 2_203_156_871_395_971_462


def test_a_simulation_that_refuses_snapshots_does_not_end_as_if_nothing_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Client.teach

    def teach(client: Client, manifest: Manifest, snapshot: bytes) -> None:
        if manifest.peer == 1:
            raise SnapshotError("not finite")
        real(client, manifest, snapshot)

    monkeypatch.setattr(Client, "teach", teach)
    with pytest.raises(ReservationsError, match=r"without snapshots of peer 1, which were refused; .* says why"):
        command(count=3, rounds=1, pool="cnn6@0.125", samples=300, threads=1, out=tmp_path / "out")
    assert Summary.read(tmp_path / "out" / "summary.json").peers[0].quarantine_reasons == {"1": "not finite"}


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("place", ["binds", "computes"])
def test_trouble_of_this_machine_is_not_laid_to_a_peer(
    mesh: Mesh, stored: Files, monkeypatch: pytest.MonkeyPatch, kind: type[RuntimeError], place: str
) -> None:
    def fail(*_: object) -> None:
        raise kind("of this machine")

    monkeypatch.setattr("crad_p2p.frozen.Frozen.bind", fail if place == "binds" else lambda *_: fail)
    (client,) = [client for peer, client in mesh.clients.items() if peer == 0]
    client.open_round()
    with pytest.raises(kind, match="of this machine"):
        client.teach(*stored[1][2][3])
