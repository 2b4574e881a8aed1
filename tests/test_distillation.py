"""Eq. 9 and the local epoch against the same numbers worked out in NumPy, and shards too small to learn from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from crad_p2p.aggregation import Aggregation, mixture
from crad_p2p.client import Client
from crad_p2p.data.datasets import Dataset, ImageSet
from crad_p2p.data.epoch import LocalEpoch
from crad_p2p.data.partition import Split
from crad_p2p.distillation import EpochLog, Step, distillation_loss, own_labels, train_epoch
from crad_p2p.federation import TrainingSettings, build_federation
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.sgd import Sgd

CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------- Eq. 9


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def equation_9(z: np.ndarray, y: np.ndarray, q: np.ndarray, temperature: float, weight: float) -> float:
    """Sample by sample: (1 - lambda) CE + lambda T^2 KL(q || softmax(z/T)), then the mean over samples."""
    total = 0.0
    plain, soft = softmax(z), softmax(z / temperature)
    for b in range(len(z)):
        cross_entropy = -np.log(plain[b, y[b]])
        divergence = sum(q[b, c] * np.log(q[b, c] / soft[b, c]) for c in range(z.shape[1]) if q[b, c] > 0)
        total += (1 - weight) * cross_entropy + weight * temperature**2 * divergence
    return total / len(z)


def example(samples: int = 6, classes: int = 10) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([samples, classes])
    q = rng.dirichlet(np.full(classes, 0.4), samples)
    q[q < 0.02] = 0  # zeros in the target
    q /= q.sum(1, keepdims=True)
    q[0] = np.eye(classes)[1]
    return rng.normal(0, 3, (samples, classes)), rng.integers(0, classes, samples), q


def loss_of(z: np.ndarray, y: np.ndarray, q: np.ndarray, temperature: float, weight: float) -> Tensor:
    return distillation_loss(
        torch.from_numpy(z), torch.from_numpy(y), torch.from_numpy(q), temperature=temperature, weight=weight
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("weight", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("samples", "classes"), [(1, 2), (6, 10), (5, 100)])
def test_the_loss_is_equation_9(samples: int, classes: int, weight: float, temperature: float) -> None:
    z, y, q = example(samples, classes)
    loss = loss_of(z, y, q, temperature, weight)
    assert loss.ndim == 0
    assert float(loss) == pytest.approx(equation_9(z, y, q, temperature, weight), rel=1e-12)


def test_the_mean_is_over_samples_and_not_over_classes() -> None:
    """``reduction="mean"`` would divide by the number of classes too, and ``sum`` by nothing."""
    z, y, q = np.zeros((4, 8)), np.zeros(4, np.int64), np.eye(8)[:4]
    assert float(loss_of(z, y, q, 1.0, 1.0)) == pytest.approx(np.log(8))  # KL(one-hot || uniform) of every sample


def test_the_temperature_is_squared_back() -> None:
    z, y, q = example()
    divergence = equation_9(z, y, q, 3.0, 1.0) / 9
    assert float(loss_of(z, y, q, 3.0, 1.0)) == pytest.approx(9 * divergence)
    # So that the gradient neither vanishes nor grows with T: near T = infinity it is (z - mean) / C for a flat target.
    z = np.random.default_rng(1).normal(0, 1, (1, 5))
    logits = torch.from_numpy(z).requires_grad_()
    target = torch.full((1, 5), 0.2, dtype=torch.float64)
    distillation_loss(logits, torch.tensor([0]), target, temperature=1e4, weight=1.0).backward()
    np.testing.assert_allclose(logits.grad, (z - z.mean()) / 5, rtol=1e-3, atol=1e-5)


def test_zeros_in_the_target_give_finite_loss_and_gradient() -> None:
    logits = torch.tensor([[200.0, -200.0, 0.0]], requires_grad=True)
    target = torch.tensor([[0.0, 0.5, 0.5]])
    loss = distillation_loss(logits, torch.tensor([0]), target, temperature=1.0, weight=0.5)
    loss.backward()
    assert bool(torch.isfinite(loss))
    np.testing.assert_allclose(logits.grad, [[0.5, -0.25, -0.25]], rtol=0, atol=1e-6)


def test_the_weights_at_their_ends() -> None:
    z, y, q = example()
    assert float(loss_of(z, y, q, 3.0, 0.0)) == pytest.approx(-np.log(softmax(z)[np.arange(6), y]).mean())
    own = softmax(z / 3)
    assert float(loss_of(z, y, own, 3.0, 1.0)) == pytest.approx(0, abs=1e-12)
    assert float(loss_of(z, (y + 1) % 10, q, 3.0, 1.0)) == float(loss_of(z, y, q, 3.0, 1.0))  # labels play no part


# ------------------------------------------------------------------------------------------------------ the local epoch

SAMPLES, PIXELS, CLASSES = 11, 4, 3
RNG = np.random.default_rng(21)
IMAGES = RNG.integers(0, 256, (SAMPLES, 1, 2, 2), dtype=np.uint8)
LABELS = RNG.integers(0, CLASSES, SAMPLES)
START = RNG.normal(0, 0.5, (PIXELS, CLASSES))
TARGET = RNG.dirichlet(np.ones(CLASSES), SAMPLES)
for row, label in zip(TARGET[:8], LABELS[:8], strict=True):  # right on at least eight of the eleven
    row[[label, row.argmax()]] = row[[row.argmax(), label]]
MASS = np.linspace(0.3, 0.9, SAMPLES)
LAMBDA, T = 0.7, 3.0


class Linear(nn.Module):
    """Logits x @ weight in float64, which NumPy can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(START.copy()))
        self.modes: list[bool] = []

    def forward(self, pixels: Tensor) -> Tensor:
        self.modes.append(self.training)
        return pixels.flatten(1).double() @ self.weight


def local_epoch(
    count: int = SAMPLES, batches: tuple[slice, ...] = (slice(0, 4), slice(4, 8), slice(8, 11))
) -> LocalEpoch:
    scale = torch.tensor([255.0]).reshape(1, 1, 1)
    return LocalEpoch(torch.from_numpy(IMAGES[:count]), torch.from_numpy(LABELS[:count]), batches, scale * 0, scale)


def targets(batch: slice, _logits: Tensor) -> Aggregation:
    q, one = torch.from_numpy(TARGET[batch]), torch.ones(1, dtype=torch.float64)
    return mixture(q[None], one)._replace(target=q, mass=torch.from_numpy(MASS[batch]))


def distilling(give: Any = targets, weight: float = LAMBDA) -> Any:
    """The objective of Eq. 9 towards these targets."""

    def objective(batch: slice, logits: Tensor, labels: Tensor) -> Step:
        aggregation = give(batch, logits)
        return Step(
            distillation_loss(logits, labels, aggregation.target.float(), temperature=T, weight=weight), aggregation
        )

    return objective


def descend(
    weight: float, *, rate: float = 0.5, momentum: float = 0.0, decay: float = 0.0, clip: float = 1e9
) -> tuple[np.ndarray, list[float]]:
    """The parameters after the epoch, and the loss of each batch before its step."""
    w, velocity, losses = START.copy(), np.zeros_like(START), []
    for batch in local_epoch().batches:
        x, y, q = IMAGES[batch].reshape(-1, PIXELS) / 255, LABELS[batch], TARGET[batch]
        z = x @ w
        losses.append(equation_9(z, y, q, T, weight))
        slope = (1 - weight) * (softmax(z) - np.eye(CLASSES)[y]) + weight * T * (softmax(z / T) - q)
        gradient = x.T @ slope / len(x)
        gradient = gradient * min(1.0, clip / (np.linalg.norm(gradient) + 1e-6)) + decay * w
        velocity = momentum * velocity + gradient
        w = w - rate * velocity
    return w, losses


def run_epoch(
    objective: Any = None, *, weight: float = LAMBDA, clip: float = 1e9, rate: float = 0.5, **sgd: float
) -> tuple[Linear, EpochLog]:
    model = Linear()
    model.eval()  # as validation leaves it
    log = train_epoch(
        model,
        Sgd(dict(model.named_parameters()), rate, **{"momentum": 0.0, "weight_decay": 0.0, **sgd}),
        local_epoch(),
        objective or distilling(weight=weight),
        TrainingSettings(clip_norm=clip),
    )
    return model, log


@pytest.mark.parametrize("weight", [0.0, 0.7, 1.0])
def test_an_epoch_takes_one_step_a_batch(weight: float) -> None:
    model, log = run_epoch(weight=weight)
    expected, losses = descend(weight)
    np.testing.assert_allclose(model.weight.detach(), expected, rtol=0, atol=1e-6)
    assert log.loss == pytest.approx(np.average(losses, weights=[4, 4, 3]), rel=1e-6)
    assert model.modes == [True] * 3


def test_momentum_and_weight_decay_are_the_optimisers() -> None:
    model, _ = run_epoch(momentum=0.9, weight_decay=0.1)
    np.testing.assert_allclose(model.weight.detach(), descend(LAMBDA, momentum=0.9, decay=0.1)[0], rtol=0, atol=1e-6)


def test_gradients_are_clipped_by_their_norm() -> None:
    for clip in (1e-3, 0.05):
        model, _ = run_epoch(clip=clip)
        np.testing.assert_allclose(model.weight.detach(), descend(LAMBDA, clip=clip)[0], rtol=0, atol=1e-6)
    model, _ = run_epoch(clip=1e-3, rate=1.0)
    assert float((model.weight.detach() - torch.from_numpy(START)).norm()) <= 3.001e-3
    assert not np.allclose(descend(LAMBDA, clip=0.05)[0], descend(LAMBDA)[0], atol=1e-3)


def test_the_log_holds_means_over_samples() -> None:
    _, log = run_epoch()
    assert log.samples == SAMPLES
    assert log.target_mass == pytest.approx(MASS.mean())
    assert log.target_collapsed == pytest.approx((MASS < 0.5).mean())
    assert log.target_top1 == pytest.approx((TARGET.argmax(1) == LABELS).mean())
    assert 0 < log.target_collapsed < 1
    assert 8 / 11 <= log.target_top1 < 1
    assert ((IMAGES.reshape(-1, PIXELS) @ START).argmax(1) == LABELS).mean() < 0.6  # the student's own would show


def test_without_teachers_it_is_plain_cross_entropy_at_weight_one() -> None:
    model, log = run_epoch(own_labels)
    expected, losses = descend(0.0)
    np.testing.assert_allclose(model.weight.detach(), expected, rtol=0, atol=1e-6)
    assert log == EpochLog(SAMPLES, log.loss, None, None, None)
    assert log.loss == pytest.approx(np.average(losses, weights=[4, 4, 3]), rel=1e-6)


def test_targets_are_asked_for_batch_by_batch_with_the_students_logits() -> None:
    asked: list[tuple[slice, np.ndarray]] = []

    def give(batch: slice, logits: Tensor) -> Aggregation:
        asked.append((batch, logits.detach().numpy().copy()))
        return targets(batch, logits)

    steps: list[tuple[int, int]] = []
    model = Linear()
    train_epoch(
        model,
        Sgd(dict(model.named_parameters()), 0.5, momentum=0.0, weight_decay=0.0),
        local_epoch(),
        distilling(give),
        TrainingSettings(),
        lambda *step: steps.append(step),
    )
    assert [batch for batch, _ in asked] == list(local_epoch().batches)
    np.testing.assert_allclose(asked[0][1], IMAGES[:4].reshape(-1, PIXELS) / 255 @ START, rtol=0, atol=1e-6)
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_an_epoch_without_a_batch_changes_nothing() -> None:
    model = Linear()
    log = train_epoch(
        model,
        Sgd(dict(model.named_parameters()), 0.5, momentum=0.0, weight_decay=0.0),
        local_epoch(1, ()),
        distilling(),
        TrainingSettings(),
    )
    assert log == EpochLog(0, None, None, None, None)
    np.testing.assert_array_equal(model.weight.detach(), START)


# ---------------------------------------------------------------------------------------------------- degenerate shards


def client_of(folder: Path, train: int, arch: str = "resnet18@0.1", held: int = 3) -> Client:
    rng = np.random.default_rng(5)
    part = ImageSet(rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8), rng.integers(0, CLASSES, 40))
    federation = build_federation(
        {
            "federation": "tiny",
            "training": {"batch_size": 4},
            "peers": [{"id": i, "address": f"host:{i + 1}", "arch": arch} for i in range(3)],
        },
        "test",
    )
    split = Split(np.arange(train), np.arange(20, 20 + held), np.arange(30, 30 + held))
    data = Dataset("made", part, part, tuple("abc"), (0.5,), (0.5,), "crop")
    return Client(federation, 0, data, split, device=CPU, folder=folder)


def never() -> tuple[bytes, bytes]:
    """The last good round, of tests in which training must not diverge."""
    pytest.fail("training diverged")


def run_round(folder: Path, train: int, *, teachers: int, arch: str = "resnet18@0.1") -> tuple[Client, bytes, EpochLog]:
    client = client_of(folder, train, arch)
    client.initialise()
    before = client.snapshot()
    client.open_round()
    for peer in range(1, teachers + 1):
        manifest = Manifest(
            run="a" * 64,
            peer=peer,
            round=0,
            arch=arch,
            size=len(before),
            sha256=hashlib.sha256(before).hexdigest(),
            statistics=ClassStatistics(counts=(0, 3, 9), hits=(0, 1, 9), predicted=(4, 4, 4)),
            consumed=(),
            model_round=0,
            missing=(),
            quarantined=(),
        )
        client.teach(manifest, before)
    log = client.train(list(range(1, teachers + 1)), never)
    assert client.round == 1
    return client, before, log


@pytest.mark.parametrize("arch", ["resnet18@0.1", "cnn6@0.1"])
@pytest.mark.parametrize("teachers", [0, 2])
@pytest.mark.parametrize(("train", "learned"), [(1, 0), (2, 2), (3, 3), (5, 4), (6, 6), (9, 8)])
def test_a_tiny_shard_trains_on_what_it_can(tmp_path: Path, train: int, learned: int, teachers: int, arch: str) -> None:
    client, before, log = run_round(tmp_path, train, teachers=teachers, arch=arch)
    assert client.train_samples == train
    assert log.samples == learned
    assert (log.loss is None) == (learned == 0)
    assert (log.target_mass is None) == (learned == 0 or teachers == 0)
    assert (client.snapshot() == before) == (learned == 0)
    assert sum(client.validate().counts) == 3
    restored = client_of(tmp_path / "restored", train, arch)
    restored.restore(1, client.snapshot(), client.checkpoint())
    assert restored.snapshot() == client.snapshot()
    assert restored.checkpoint() == client.checkpoint()


@pytest.mark.parametrize("teachers", [0, 2])
def test_a_peer_without_training_samples_can_still_publish(tmp_path: Path, teachers: int) -> None:
    client, before, log = run_round(tmp_path, 0, teachers=teachers)
    assert log == EpochLog()
    assert client.snapshot() == before
    assert sum(client.validate().counts) == 3


def test_a_peer_without_held_out_samples(tmp_path: Path) -> None:
    client = client_of(tmp_path, 8, held=0)
    client.initialise()
    assert client.validate().counts == (0, 0, 0)
    assert client.validate().accuracy is None
    evaluation = client.evaluate(client.snapshot())
    assert evaluation.local_accuracy is None
    assert evaluation.global_accuracy is not None
