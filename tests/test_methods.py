"""The methods that are no target of the backbone, each against a second reading in plain loops, and the known traps."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crad_p2p import weights
from crad_p2p.architectures import build_model, parameter_count
from crad_p2p.client import Client
from crad_p2p.data.datasets import Dataset, ImageSet, load_dataset
from crad_p2p.data.epoch import draw_epoch
from crad_p2p.data.partition import Split
from crad_p2p.distillation import divergence
from crad_p2p.federation import DfmlSettings, Federation, build_federation
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.methods.build import build_method, layouts_of
from crad_p2p.methods.catalogue import METHODS
from crad_p2p.methods.dfml import alpha, is_peak, log_proportions, size_weights, weighted_softmax_loss
from crad_p2p.methods.fedmkd import memory_share
from crad_p2p.methods.interface import Lesson, Student
from crad_p2p.randomness import generator
from crad_p2p.results import RoundRecord, Summary
from crad_p2p.simulation import simulate
from crad_p2p.snapshot import SnapshotError
from crad_p2p.teachers import posterior_of_logits

CPU = torch.device("cpu")
CLASSES = 5
ARCHS = {7: "cnn6@0.125", 0: "resnet18@0.125", 3: "resnet18-half@0.125"}  # ids neither dense nor in order


def federation(method: dict[str, Any], **fields: Any) -> Federation:
    return build_federation(
        {
            "federation": "tiny",
            "rounds": 2,
            "data": {"dataset": "digits", "samples": 300, "holdout": 0.4},
            "training": {"batch_size": 32, "evaluate_every": 1},
            "method": method,
            "peers": [{"id": peer, "address": f"host:{peer + 1}", "arch": arch} for peer, arch in ARCHS.items()],
            **fields,
        },
        "test",
    )


def manifest_of(peer: int, arch: str) -> Manifest:
    some = (3,) * CLASSES
    return Manifest(
        run="a" * 64,
        peer=peer,
        round=0,
        arch=arch,
        size=1,
        sha256="b" * 64,
        statistics=ClassStatistics(counts=some, hits=some, predicted=some),
        consumed=(),
        model_round=0,
        missing=(),
        quarantined=(),
    )


def softmaxes(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.softmax(torch.from_numpy(rng.normal(0, 2, shape)).float(), -1)


def test_the_methods_with_one_target_are_those_that_say_so() -> None:
    for name, traits in METHODS.items():
        fields = {"data": {"dataset": "digits", "transfer_samples": 50}, "rounds": 30}
        settings = federation({"name": name}, **fields)
        method = build_method(settings, Student(CLASSES, 1, (9,) * CLASSES))
        some = (3,) * CLASSES
        surprise = (0.5,) * CLASSES if traits.publishes_cross_entropy else None
        statistics = ClassStatistics(counts=some, hits=some, predicted=some, cross_entropy=surprise)
        assert traits.has_target == (method.combination([statistics] * 2) is not None), name


class Example:
    """One batch: logits of the student, labels, posteriors of the teachers and of the memory."""

    def __init__(self, teachers: int, samples: int = 6) -> None:
        rng = np.random.default_rng([teachers, samples])
        self.logits = torch.from_numpy(rng.normal(0, 2, (samples, CLASSES)))
        self.labels = torch.from_numpy(rng.integers(0, CLASSES, samples))
        self.peers = softmaxes(rng, teachers, samples, CLASSES)
        self.memory = softmaxes(rng, samples, CLASSES)
        self.archs = [list(ARCHS.values())[j % 3] for j in range(teachers)]

    def lesson(self, number: int = 1) -> Lesson:
        manifests = tuple(manifest_of(j, arch) for j, arch in enumerate(self.archs))
        return Lesson(number, manifests, lambda batch: self.peers[:, batch], lambda batch: self.memory[batch])

    def loss(self, method: dict[str, Any], label_counts: Sequence[int] = (1,) * CLASSES, number: int = 1) -> Tensor:
        student = Student(CLASSES, 1, tuple(label_counts))
        objective = build_method(federation(method), student).objective(self.lesson(number))
        return objective(slice(0, len(self.labels)), self.logits, self.labels).loss

    def gradient(self, method: dict[str, Any], number: int = 1) -> Tensor:
        self.logits = self.logits.detach().requires_grad_()
        self.loss(method, number=number).backward()
        assert self.logits.grad is not None
        return self.logits.grad

    def as_lists(self) -> tuple[list[list[float]], list[int], list[list[list[float]]], list[list[float]]]:
        return self.logits.tolist(), self.labels.tolist(), self.peers.double().tolist(), self.memory.double().tolist()


# ------------------------------------------------------------------------------------------------ weighted divergences


@pytest.mark.parametrize("teachers", [1, 2, 5])
def test_the_divergence_is_the_weighted_sum_of_all(teachers: int) -> None:
    example = Example(teachers)
    z, _, peers, _ = example.as_lists()
    share = np.random.default_rng(teachers).dirichlet(np.ones(teachers))
    found = divergence(example.logits / 2, example.peers.double(), torch.from_numpy(share))
    expected = sum(w * reference.mean_kl(q, z, 2.0) for w, q in zip(share, peers, strict=True))
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_the_divergence_is_from_the_teacher_to_the_student_and_not_the_other_way() -> None:
    q = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)  # KL(student || q) would be infinite
    logits = torch.zeros(1, 2, dtype=torch.float64)
    assert float(divergence(logits, q, torch.ones(1).double())) == pytest.approx(np.log(2))


def test_no_gradient_reaches_the_teachers() -> None:
    q = softmaxes(np.random.default_rng(1), 2, 3, 4).double().requires_grad_()
    logits = torch.zeros(3, 4, requires_grad=True)
    divergence(logits, q, torch.tensor([0.3, 0.7], dtype=torch.float64)).backward()
    assert q.grad is None
    expected = (torch.full((3, 4), 0.25) - 0.3 * q[0].detach() - 0.7 * q[1].detach()) / 3
    torch.testing.assert_close(logits.grad, expected.float(), rtol=1e-5, atol=1e-7)


def test_teachers_that_are_certain_give_no_nan() -> None:
    q = torch.eye(3, dtype=torch.float64)[:, None]
    logits = torch.tensor([[200.0, -200.0, 0.0]], requires_grad=True)
    loss = divergence(logits, q, torch.full((3,), 1 / 3, dtype=torch.float64))
    loss.backward()
    assert bool(torch.isfinite(loss))
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


# -------------------------------------------------------------------------------------------------------------- FedMKD


@pytest.mark.parametrize("teachers", [1, 2, 6])
@pytest.mark.parametrize("memory_weight", ["half", "uniform"])
def test_the_loss_of_fedmkd(teachers: int, memory_weight: str) -> None:
    example = Example(teachers)
    settings = {"temperature": 2.0, "distillation_weight": 0.6, "fedmkd": {"memory_weight": memory_weight}}
    share = {"half": 0.5, "uniform": 1 / (teachers + 1)}[memory_weight]
    expected = reference.fedmkd_loss(*example.as_lists(), weight=0.6, temperature=2.0, share=share)
    assert float(example.loss({"name": "fedmkd", **settings})) == pytest.approx(expected, rel=1e-6)


def test_the_share_of_the_memory() -> None:
    assert [memory_share("half", teachers) for teachers in (1, 2, 9)] == [0.5, 0.5, 0.5]
    assert [memory_share("uniform", teachers) for teachers in (1, 2, 9)] == [1 / 2, 1 / 3, 1 / 10]


def test_a_uniform_memory_is_one_more_teacher_in_the_mean() -> None:
    example = Example(3)
    found = example.gradient({"name": "fedmkd", "fedmkd": {"memory_weight": "uniform"}})
    example.peers = torch.cat([example.peers, example.memory[None]])
    example.archs.append("cnn6")
    torch.testing.assert_close(found, example.gradient({"name": "uniform"}), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["fedmkd", "crad", "local"])
def test_without_peers_the_loss_is_the_cross_entropy(name: str) -> None:
    example = Example(0)
    z, y, _, _ = example.as_lists()
    assert float(example.loss({"name": name})) == pytest.approx(reference.cross_entropy(z, y))


# ---------------------------------------------------------------------------------------------------------------- DFML


@pytest.mark.parametrize("teachers", [1, 2, 6])
@pytest.mark.parametrize("number", [1, 4, 5, 10])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_of_dfml(teachers: int, number: int, temperature: float) -> None:
    example = Example(teachers)
    z, y, peers, _ = example.as_lists()
    counts = [40, 3, 7, 1, 9]
    sizes = {
        arch: sum(p.numel() for p in build_model(arch, classes=CLASSES, channels=1).parameters())
        for arch in ARCHS.values()
    }
    expected = reference.dfml_loss(
        z,
        y,
        peers,
        [sizes[arch] for arch in example.archs],
        counts,
        alpha=0.8 * (1 - np.cos(2 * np.pi * number / 10)) / 2,
        temperature=temperature,
    )
    method = {"name": "dfml", "temperature": 7.0, "dfml": {"temperature": temperature}}
    assert float(example.loss(method, counts, number)) == pytest.approx(expected, rel=1e-6)


def test_without_peers_dfml_learns_from_its_labels_alone() -> None:
    example = Example(0)
    z, y, _, _ = example.as_lists()
    counts = [40, 3, 7, 1, 9]
    expected = reference.weighted_softmax_loss(z, y, counts)
    assert float(example.loss({"name": "dfml"}, counts, 5)) == pytest.approx(expected, rel=1e-6)


def test_alpha_goes_from_its_least_to_its_largest_and_back() -> None:
    settings = DfmlSettings(alpha_min=0.1, alpha_max=0.7, period=8)
    found = [alpha(number, settings) for number in range(17)]
    assert found[0] == found[8] == found[16] == 0.1
    assert found[4] == found[12] == pytest.approx(0.7, abs=1e-15)
    assert [found[2], found[6]] == pytest.approx([0.4, 0.4])
    assert found[:5] == sorted(found[:5])
    assert [number for number in range(17) if is_peak(number, settings)] == [4, 12]
    assert [number for number in range(21) if is_peak(number, DfmlSettings())] == [5, 15]
    assert [number for number in range(7) if is_peak(number, DfmlSettings(period=2))] == [1, 3, 5]
    assert alpha(5, DfmlSettings()) == pytest.approx(0.8)


def test_classes_without_an_image_get_no_push() -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 3, (8, CLASSES))).float()
    labels = torch.tensor([0, 0, 0, 2, 2, 2, 2, 4])
    pushed = {}
    for name, log_b in (("wsm", log_proportions([30, 0, 40, 0, 10])), ("plain", torch.zeros(CLASSES))):
        leaf = logits.clone().requires_grad_()
        weighted_softmax_loss(leaf, labels, log_b).backward()
        assert leaf.grad is not None
        pushed[name] = leaf.grad
    assert bool((pushed["wsm"][:, [1, 3]] == 0).all())
    assert bool((pushed["plain"][:, [1, 3]] > 0).all())
    assert bool((pushed["wsm"][:, [0, 2, 4]] != 0).all())


def test_the_proportion_of_the_label_is_a_constant_of_the_loss() -> None:
    counts = torch.tensor([30, 1, 40, 9, 20])
    log_b = log_proportions(counts.tolist())
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 3, (6, CLASSES))).requires_grad_()
    labels = torch.tensor([0, 1, 2, 3, 4, 1])
    with_label = weighted_softmax_loss(logits, labels, log_b)
    without = (torch.logsumexp(logits + log_b, -1) - logits.gather(1, labels[:, None])[:, 0]).mean()
    assert (with_label - without).item() == pytest.approx(-float(log_b[labels].mean()))
    one, other = (torch.autograd.grad(loss, logits)[0] for loss in (with_label, without))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    # Equal proportions are the plain cross-entropy.
    even = weighted_softmax_loss(logits, labels, log_proportions([7] * CLASSES))
    assert even.item() == pytest.approx(F.cross_entropy(logits, labels).item())


def test_proportions_of_nothing() -> None:
    assert log_proportions([0, 0]).tolist() == [0, 0]
    assert log_proportions([1, 0, 3]).tolist() == pytest.approx([np.log(0.25), -1e9, np.log(0.75)])


def test_teachers_count_by_their_trainable_parameters() -> None:
    assert size_weights([10, 30]).tolist() == [0.25, 0.75]
    assert parameter_count("cnn6", classes=10, channels=3) == 816_202  # without running statistics
    assert parameter_count("resnet18", classes=10, channels=3) == 11_173_962


# ---------------------------------------------------------------------------------------------------------- the clients

SPLIT = Split(np.arange(0, 43), np.arange(43, 55), np.arange(55, 60))


def dataset() -> Dataset:
    rng = np.random.default_rng(11)
    part = ImageSet(rng.integers(0, 256, (60, 1, 8, 8), dtype=np.uint8), rng.integers(0, CLASSES, 60))
    return Dataset("made", part, part, tuple("abcde"), (0.5,), (0.25,), "crop")


def client_of(folder: Path, method: dict[str, Any], **fields: Any) -> Client:
    client = Client(federation(method, **fields), 7, dataset(), SPLIT, device=CPU, folder=folder)
    client.initialise()
    return client


def teacher_of(seed: int) -> tuple[Manifest, bytes]:
    model = build_model("resnet18@0.125", classes=CLASSES, channels=1)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            draw = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
            value.copy_(draw.abs() + 0.5 if name.endswith("running_var") else draw)
    snapshot = weights.encode(model.state_dict())
    manifest = manifest_of(0, "resnet18@0.125")
    sha256 = hashlib.sha256(snapshot).hexdigest()
    return manifest.model_copy(update={"size": len(snapshot), "sha256": sha256}), snapshot


def one_round(client: Client, teachers: Sequence[tuple[Manifest, bytes]] = ()) -> tuple[bytes, bytes]:
    before = client.snapshot(), client.checkpoint()
    client.open_round()
    for teacher in teachers:
        client.teach(*teacher)
    client.train([manifest.peer for manifest, _ in teachers], lambda: before)
    return client.snapshot(), client.checkpoint()


def test_the_memory_is_the_own_model_as_the_round_began_on_the_same_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(tmp_path, {"name": "fedmkd", "temperature": 2.0})
    one_round(client, [teacher_of(1)])
    before = copy.deepcopy(client.model)
    lessons: list[Lesson] = []
    objective = type(client._method).objective
    remembered: list[Tensor] = []

    def spied(method: Any, lesson: Lesson) -> Any:
        lessons.append(lesson)
        remembered.append(lesson.memory(slice(0, 43)).clone())
        return objective(method, lesson)

    monkeypatch.setattr(type(client._method), "objective", spied)
    one_round(client, [teacher_of(1)])
    assert [(lesson.number, len(lesson.teachers)) for lesson in lessons] == [(2, 1)]
    data = dataset()
    local = draw_epoch(
        data.train.images[SPLIT.train],
        data.train.labels[SPLIT.train],
        batch_size=32,
        augmentation="crop",
        mean=data.mean,
        std=data.std,
        generator=generator(1024, "local epoch", peer=7, round_number=2),
        device=CPU,
    )
    with torch.no_grad():
        expected = posterior_of_logits(before.eval()(local.pixels(slice(0, 43))), 2.0)
    torch.testing.assert_close(remembered[0], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        expected, posterior_of_logits(client.model.eval()(local.pixels(slice(0, 43))).detach(), 2.0), atol=1e-3
    )


def test_in_warm_up_rounds_there_is_no_memory(tmp_path: Path) -> None:
    warm = client_of(tmp_path / "warm", {"name": "fedmkd", "warmup_rounds": 1})
    plain = client_of(tmp_path / "plain", {"name": "local"})
    warm.open_round()
    assert not [path for path in (tmp_path / "warm").rglob("*") if path.is_file()]  # it has not been run in vain
    assert one_round(warm) == one_round(plain)


class Peaks:
    """A client of dfml with a period of four, after each of its rounds; the peak is in round 2."""

    def __init__(self, folder: Path) -> None:
        self.method = {"name": "dfml", "dfml": {"period": 4}}
        self.client = client_of(folder, self.method)
        self.files = [(self.client.snapshot(), self.client.checkpoint())]
        self.beside = [self.client.kept_beside()]
        for _ in range(3):
            self.files.append(one_round(self.client, [teacher_of(1)]))
            self.beside.append(self.client.kept_beside())


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Peaks:
    return Peaks(tmp_path_factory.mktemp("peaks"))


def kept_model(checkpoint: bytes) -> dict[str, Tensor]:
    return {
        name.removeprefix("method."): value
        for name, value in weights.decode(checkpoint).items()
        if name.startswith("method.")
    }


def test_the_peak_is_the_model_of_the_round_with_the_largest_alpha(peaks: Peaks) -> None:
    assert [bool(kept_model(checkpoint)) for _, checkpoint in peaks.files] == [False, False, True, True]
    for _, checkpoint in peaks.files[2:]:
        assert weights.encode(kept_model(checkpoint)) == peaks.files[2][0]
    assert peaks.files[3][0] != peaks.files[2][0]
    for (_, checkpoint), beside in zip(peaks.files, peaks.beside, strict=True):
        assert beside is not None
        assert weights.encode(kept_model(beside)) == weights.encode(kept_model(checkpoint))


def test_the_peak_survives_a_restart(peaks: Peaks, tmp_path: Path) -> None:
    for number in (1, 2):
        again = client_of(tmp_path / str(number), peaks.method)
        again.restore(number, *peaks.files[number])
        for following in peaks.files[number + 1 :]:
            assert one_round(again, [teacher_of(1)]) == following
    lost = client_of(tmp_path / "lost", peaks.method)
    lost.restore(2, peaks.files[2][0], weights.encode({}))  # as after --recover
    assert kept_model(lost.checkpoint()) == {}


def test_peak_and_model_are_evaluated_both(peaks: Peaks) -> None:
    client = peaks.client
    for number in (0, 1):  # nothing is kept yet
        found = client.evaluate(peaks.files[number][0], peaks.files[number][1])
        assert found.peak_global_accuracy == found.global_accuracy is not None
        assert found.peak_local_accuracy == found.local_accuracy is not None
    at_peak = client.evaluate(peaks.files[2][0], peaks.files[2][1])
    for beside in (peaks.files[3][1], peaks.beside[3]):  # from a checkpoint, or from what the simulation keeps of it
        after = client.evaluate(peaks.files[3][0], beside)
        assert after.peak_global_accuracy == at_peak.global_accuracy
        assert after.peak_local_accuracy == at_peak.local_accuracy
    assert client.evaluate(peaks.files[3][0]).peak_global_accuracy == after.global_accuracy


def test_other_methods_keep_nothing_beside_their_model(tmp_path: Path, peaks: Peaks) -> None:
    client = client_of(tmp_path, {"name": "crad"})
    snapshot, checkpoint = one_round(client, [teacher_of(1)])
    assert all(name.startswith("momentum.") for name in weights.decode(checkpoint))
    assert client.kept_beside() is None
    assert client.evaluate(snapshot).peak_global_accuracy is None
    with pytest.raises(SnapshotError, match="checkpoint of round 2 is not of this method: crad keeps nothing, and it"):
        client.restore(2, *peaks.files[2])


# ---------------------------------------------------------------------------------------------------------- whole runs

Run = tuple[Summary, list[RoundRecord]]


def run(settings: Federation, **options: Any) -> Run:
    data = load_dataset(settings.data, seed=settings.seed, data_dir=Path())
    return simulate(settings, data, device=CPU, threads=1, **options)


def digests(history: Sequence[RoundRecord]) -> dict[tuple[int, int], str]:
    return {(record.round, record.peer): record.snapshot_sha256 for record in history}


@pytest.fixture(scope="module")
def crad() -> Run:
    return run(federation({"name": "crad"}, rounds=1))


def test_precision_gives_the_models_of_crad(crad: Run) -> None:
    assert digests(run(federation({"name": "precision"}, rounds=1))[1]) == digests(crad[1])


@pytest.mark.parametrize("name", ["acc", "sup", "sm", "lcb", "ce", "inv_sigma", "fedmkd"])
def test_every_method_reaches_the_training(crad: Run, name: str) -> None:
    summary, history = run(federation({"name": name}, rounds=1))
    assert summary.method == name
    assert digests(history) != digests(crad[1])
    for record in history:
        assert record.peak_global_accuracy is None
        assert record.target_mass is not None
    assert all(peer.peak_global_accuracy is peer.peak_local_accuracy is None for peer in summary.peers)


def test_a_run_of_dfml_reports_its_peaks() -> None:
    settings = federation({"name": "dfml", "dfml": {"period": 2}}, rounds=2)
    summary, history = run(settings, workers=2)
    for peer in ARCHS:
        first, second = (record for record in history if record.peer == peer)
        assert first.peak_global_accuracy == first.global_accuracy  # the peak itself
        assert second.peak_global_accuracy == first.global_accuracy
        assert second.target_mass == pytest.approx(1)
        (result,) = (each for each in summary.peers if each.id == peer)
        assert result.peak_global_accuracy == first.global_accuracy
        assert result.peak_local_accuracy is not None
    assert any(record.peak_global_accuracy != record.global_accuracy for record in history)


def test_layouts_are_of_what_is_published() -> None:
    for name in ("crad", "dfml", "local"):
        settings = federation({"name": name})
        layouts = layouts_of(settings, classes=10, image_shape=(1, 8, 8))
        assert set(layouts) == {settings.published_by(peer, number) for peer in ARCHS for number in (0, 1)}
        model = build_model("cnn6@0.125", classes=10, channels=1)
        assert {name: spec.shape for name, spec in layouts["cnn6@0.125"].items()} == {
            name: tuple(value.shape) for name, value in model.state_dict().items()
        }


def test_a_method_without_state_does_nothing_after_a_round() -> None:
    method = build_method(federation({"name": "crad"}), Student(CLASSES, 1, (1,) * CLASSES))
    method.after_round(5, nn.Linear(1, 1))
    assert method.state() == {}
