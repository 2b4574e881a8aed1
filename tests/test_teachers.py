"""Streamed teachers against the literal loop of Algorithm 1, and what may stay in memory."""

from __future__ import annotations

import gc
import hashlib
import itertools
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from crad_p2p import weights
from crad_p2p.aggregation import aggregate
from crad_p2p.architectures import build_model, initialise
from crad_p2p.client import Client
from crad_p2p.data.datasets import Dataset, ImageSet
from crad_p2p.data.epoch import LocalEpoch, draw_epoch
from crad_p2p.data.partition import Split
from crad_p2p.federation import Federation, build_federation
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.methods import backbone
from crad_p2p.randomness import generator
from crad_p2p.snapshot import SnapshotError
from crad_p2p.teachers import Forward, PosteriorStore, inference_batch, posterior_of_logits

CPU = torch.device("cpu")
CLASSES = 5
ARCHS = ("resnet18@0.1", "resnet18-half@0.1", "cnn6@0.1", "cnn6@0.15")


def teacher(arch: str, seed: int) -> nn.Module:
    """A model whose running statistics are not those of any batch, so that train and eval mode differ."""
    model = build_model(arch, classes=CLASSES, channels=1)
    initialise(model, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3, generator=draw)  # type: ignore[union-attr,operator]
                module.running_var.uniform_(0.5, 2, generator=draw)  # type: ignore[union-attr,operator]
        model.classifier.weight.mul_(5)  # type: ignore[union-attr,operator]
    return model


TEACHERS = {peer: teacher(arch, peer) for peer, arch in zip((1, 2, 5, 9), ARCHS, strict=True)}


def epoch(n: int = 43, batch_size: int = 8, size: int = 8) -> LocalEpoch:
    rng = np.random.default_rng(n)
    return draw_epoch(
        rng.integers(0, 256, (n, 1, size, size), dtype=np.uint8),
        rng.integers(0, CLASSES, n),
        batch_size=batch_size,
        augmentation="crop",
        mean=(0.5,),
        std=(0.25,),
        generator=rng,
        device=CPU,
    )


def algorithm_1(models: list[nn.Module], local: LocalEpoch, temperature: float) -> list[Tensor]:
    """The paper's order: for every batch, every teacher; all of them resident, frozen and in eval mode."""
    for model in models:
        model.eval()
    with torch.no_grad():
        return [
            torch.stack([torch.softmax(model(local.pixels(batch)) / temperature, dim=1) for model in models])
            for batch in local.batches
        ]


def frozen(model: nn.Module) -> Forward:
    """The model as it comes out of a snapshot, whatever mode it was left in."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    arch = ARCHS[list(TEACHERS.values()).index(model)]
    return weights.as_function(build_model(arch, classes=CLASSES, channels=1, device="meta"), state)


# -------------------------------------------------------------------------------------------------- the posterior store


@pytest.mark.parametrize("n", [40, 41, 43])  # 41: the last batch of one is not trained on
def test_streamed_targets_are_those_of_algorithm_1(tmp_path: Path, n: int) -> None:
    local = epoch(n)
    expected = algorithm_1(list(TEACHERS.values()), local, 3.0)
    for model in TEACHERS.values():
        model.train()
    exact, default = (PosteriorStore(tmp_path / name, local, CLASSES) for name in ("exact", "default"))
    for peer in (9, 1, 5, 2):
        exact.run(peer, frozen(TEACHERS[peer]), 3.0, batch_size=8)
        default.run(peer, frozen(TEACHERS[peer]), 3.0)
    h = torch.tensor([[1, 4, 0, 9, 2]] * 4) * torch.tensor([[1], [0], [1], [2]])
    counts = h + torch.tensor([[3, 0, 1, 5, 2]])
    assert len(expected) == len(local.batches)
    for batch, q in zip(local.batches, expected, strict=True):
        streamed = exact.batch((1, 2, 5, 9), batch)
        assert streamed.dtype == torch.float32
        assert torch.equal(streamed, q)
        assert torch.equal(aggregate(streamed, counts, h).target, aggregate(q, counts, h).target)
        torch.testing.assert_close(default.batch((1, 2, 5, 9), batch), q, rtol=1e-4, atol=1e-6)


def test_posteriors_come_in_the_order_asked_for(tmp_path: Path) -> None:
    local = epoch()
    store = PosteriorStore(tmp_path / "p", local, CLASSES)
    for peer in (2, 1):
        store.run(peer, frozen(TEACHERS[peer]), 1.0)
    one = store.batch([1], local.batches[1])
    two = store.batch([2], local.batches[1])
    assert not torch.equal(one, two)
    assert torch.equal(store.batch([1, 2], local.batches[1]), torch.cat([one, two]))
    assert torch.equal(store.batch([2, 1], local.batches[1]), torch.cat([two, one]))


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[3.0, 0.0, -3.0], [100.0, 0.0, 0.0]], dtype=torch.float64)
    for temperature in (1.0, 3.0):
        scaled = np.exp(logits.numpy() / temperature)
        found = posterior_of_logits(logits, temperature)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found, scaled / scaled.sum(1, keepdims=True), rtol=1e-5, atol=1e-30)
    half = posterior_of_logits(logits.to(torch.bfloat16), 3.0)
    assert half.dtype == torch.float32
    np.testing.assert_allclose(half.sum(1), 1, rtol=0, atol=1e-6)


def linear_teacher(pixels: int, classes: int, seed: int = 0) -> Forward:
    matrix = torch.randn(pixels, classes, generator=torch.Generator().manual_seed(seed)) / pixels
    return lambda x: x.flatten(1) @ matrix


def big_epoch(n: int = 4000) -> LocalEpoch:
    images = np.random.default_rng(0).integers(0, 256, (n, 1, 4, 4), dtype=np.uint8)
    return draw_epoch(
        images,
        np.zeros(n, np.int64),
        batch_size=50,
        augmentation="none",
        mean=(0.5,),
        std=(0.5,),
        generator=np.random.default_rng(1),
        device=CPU,
    )


def tensor_bytes() -> int:
    return sum(value.nbytes for value in gc.get_objects() if type(value) is Tensor)


def test_posteriors_live_in_files_and_not_in_memory(tmp_path: Path) -> None:
    classes = 100
    local = big_epoch()
    size = len(local.labels) * classes * 4  # 1.6 MB a teacher
    store = PosteriorStore(tmp_path / "p", local, classes)
    run = linear_teacher(16, classes)
    store.run(0, run, 3.0)  # whatever is allocated once
    gc.collect()
    before = tensor_bytes()
    tracemalloc.start()
    for peer in range(1, 5):
        store.run(peer, run, 3.0, batch_size=50)
        for batch in local.batches:
            store.batch([0, peer], batch)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gc.collect()
    assert held < 200_000
    assert peak < 400_000
    assert tensor_bytes() - before < 200_000
    files = [path for path in (tmp_path / "p").rglob("*") if path.is_file()]
    assert [path.stat().st_size for path in files] == [size] * 5


def test_no_gradients_and_a_bounded_forward_pass(tmp_path: Path) -> None:
    local = epoch(20)
    matrix = torch.randn(64, CLASSES, requires_grad=True)
    seen = []

    def model(pixels: Tensor) -> Tensor:
        logits = pixels.flatten(1) @ matrix
        seen.append((len(pixels), logits.requires_grad))
        return logits

    steps: list[tuple[int, int]] = []
    store = PosteriorStore(tmp_path / "p", local, CLASSES)
    store.run(3, model, 1.0, batch_size=8, progress=lambda *step: steps.append(step))
    assert seen == [(8, False), (8, False), (4, False)]
    assert steps == [(8, 20), (16, 20), (20, 20)]
    seen.clear()
    store.run(3, model, 1.0)
    assert [count for count, _ in seen] == [20]


@pytest.mark.parametrize(
    ("device", "size", "expected"),
    [("cpu", 32, 32), ("cpu", 28, 41), ("cpu", 8, 512), ("cpu", 224, 1), ("cpu", 1000, 1), ("cuda", 224, 20)],
)
def test_the_default_forward_pass_holds_a_fixed_number_of_pixels(device: str, size: int, expected: int) -> None:
    assert inference_batch(torch.empty(1, 3, size, size, device="meta"), torch.device(device)) == expected


def test_a_teacher_may_run_again_and_a_new_round_starts_empty(tmp_path: Path) -> None:
    local = epoch()
    store = PosteriorStore(tmp_path / "p", local, CLASSES)
    store.run(1, frozen(TEACHERS[1]), 1.0)
    first = store.batch([1], local.batches[0])
    store.run(1, frozen(TEACHERS[2]), 1.0)
    assert not torch.equal(store.batch([1], local.batches[0]), first)
    fresh = PosteriorStore(tmp_path / "p", local, CLASSES)
    assert not list((tmp_path / "p").iterdir())
    with pytest.raises(KeyError):
        fresh.batch([1], local.batches[0])
    fresh.run(1, frozen(TEACHERS[1]), 1.0)
    assert torch.equal(fresh.batch([1], local.batches[0]), first)
    fresh.close()
    assert not (tmp_path / "p").exists()


def test_a_shard_without_samples(tmp_path: Path) -> None:
    local = epoch(0)
    store = PosteriorStore(tmp_path / "p", local, CLASSES)
    store.run(1, frozen(TEACHERS[1]), 1.0)
    assert store.batch([1], slice(0, 0)).shape == (1, 0, CLASSES)


# ----------------------------------------------------------------------------------------------------------- the client


def federation(**method: Any) -> Federation:
    return build_federation(
        {
            "federation": "teachers",
            "rounds": 2,
            "method": method,
            "training": {"batch_size": 8},
            "peers": [
                {"id": peer, "address": f"host:{peer + 1}", "arch": arch}
                for peer, arch in [(3, "cnn6@0.1"), *zip(TEACHERS, ARCHS, strict=True)]
            ],
        },
        "test",
    )


def dataset() -> Dataset:
    rng = np.random.default_rng(11)
    images = rng.integers(0, 256, (60, 1, 8, 8), dtype=np.uint8)
    labels = rng.integers(0, CLASSES, 60)
    part = ImageSet(images, labels)
    return Dataset("made", part, part, tuple("abcde"), (0.5,), (0.25,), "crop")


SPLIT = Split(np.arange(0, 43), np.arange(43, 55), np.arange(55, 60))


def published(peer: int, **change: Any) -> tuple[Manifest, bytes]:
    snapshot = weights.encode(TEACHERS[peer].state_dict())
    n = tuple(int(x) for x in np.random.default_rng(peer).integers(0, 30, CLASSES))
    manifest = Manifest(
        run="a" * 64,
        peer=peer,
        round=0,
        arch=ARCHS[list(TEACHERS).index(peer)],
        size=len(snapshot),
        sha256=hashlib.sha256(snapshot).hexdigest(),
        statistics=ClassStatistics(counts=n, hits=tuple(x * (peer % 4) // 4 for x in n), predicted=n),
        consumed=(),
        model_round=0,
        missing=(),
        quarantined=(),
    )
    return manifest.model_copy(update=change), snapshot


def opened(folder: Path, **method: Any) -> Client:
    client = Client(federation(**method), 3, dataset(), SPLIT, device=CPU, folder=folder)
    client.initialise()
    client.open_round()
    return client


def never() -> tuple[bytes, bytes]:
    """The last good round, of tests in which training must not diverge."""
    pytest.fail("training diverged")


def after_round(folder: Path, arrivals: list[int], taught: list[int], **method: Any) -> bytes:
    client = opened(folder, **method)
    for peer in arrivals:
        client.teach(*published(peer))
    client.train(taught, never)
    return client.snapshot()


@pytest.mark.parametrize("rule", ["crad", "uncertainty"])
def test_the_order_of_arrival_does_not_reach_the_model(tmp_path: Path, rule: str) -> None:
    first = after_round(tmp_path, [1, 2, 5, 9], [1, 2, 5, 9], name=rule)
    for arrivals in itertools.islice(itertools.permutations([1, 2, 5, 9]), 5, None, 6):
        assert after_round(tmp_path, list(arrivals), list(arrivals), name=rule) == first
    assert after_round(tmp_path, [1, 2, 5, 9], [1, 2, 5], name=rule) != first


Spy = list[tuple[Tensor, ...]]


def spy_on_aggregate(monkeypatch: pytest.MonkeyPatch) -> tuple[Spy, list[dict[str, Any]]]:
    calls: Spy = []
    options: list[dict[str, Any]] = []

    def recorded(*arrays: Tensor, **given: Any) -> Any:
        calls.append(arrays)
        options.append(given)
        return aggregate(*arrays, **given)

    monkeypatch.setattr(backbone, "aggregate", recorded)
    return calls, options


def test_the_client_gives_each_batch_the_posteriors_of_algorithm_1_in_id_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, options = spy_on_aggregate(monkeypatch)
    method = {"name": "stage1", "temperature": 2.0, "min_support": 3, "empty_class": "student"}
    after_round(tmp_path, [9, 2, 1, 5], [9, 1, 5], **method)
    data = dataset()
    local = draw_epoch(
        data.train.images[SPLIT.train],
        data.train.labels[SPLIT.train],
        batch_size=8,
        augmentation="crop",
        mean=data.mean,
        std=data.std,
        generator=generator(1024, "local epoch", peer=3, round_number=1),
        device=CPU,
    )
    expected = algorithm_1([TEACHERS[peer] for peer in (1, 5, 9)], local, 2.0)
    statistics = [published(peer)[0].statistics for peer in (1, 5, 9)]
    student = opened(tmp_path / "again")  # before its first step
    student.model.train()
    first = torch.softmax(student.model(local.pixels(local.batches[0])) / 2.0, 1)
    torch.testing.assert_close(options[0]["student"], first.detach(), rtol=1e-5, atol=1e-7)
    assert len(calls) == len(expected)
    for (q, n, h), given, wanted in zip(calls, options, expected, strict=True):
        torch.testing.assert_close(q, wanted, rtol=1e-4, atol=1e-6)
        assert n.tolist() == [list(each.counts) for each in statistics]
        assert h.tolist() == [list(each.hits) for each in statistics]
        assert not given["student"].requires_grad
        assert {**given, "student": None} == {
            "rule": "stage1",
            "min_support": 3,
            "empty_class": "student",
            "student": None,
            "cross_entropy": None,
        }


def test_a_peer_that_teaches_again_replaces_what_it_taught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = after_round(tmp_path, [1, 2], [1, 2])
    calls, _ = spy_on_aggregate(monkeypatch)
    client = opened(tmp_path)
    nothing = (0,) * CLASSES
    first = published(1, statistics=ClassStatistics(counts=nothing, hits=nothing, predicted=nothing))[0]
    altered = weights.decode(published(1)[1])
    altered["classifier.bias"] += 1
    client.teach(first, weights.encode(altered))
    client.teach(*published(2))
    client.teach(*published(1))
    client.train([1, 2], never)
    assert client.snapshot() == expected
    assert calls[0][1][0].tolist() == list(published(1)[0].statistics.counts)


def test_one_teacher_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[list[weakref.ref[Tensor]]] = []
    decode: Callable[[bytes], dict[str, Tensor]] = weights.decode

    def counted(snapshot: bytes) -> dict[str, Tensor]:
        assert not any(reference() is not None for earlier in loaded for reference in earlier)
        tensors = decode(snapshot)
        loaded.append([weakref.ref(value) for value in tensors.values()])
        return tensors

    client = opened(tmp_path)
    monkeypatch.setattr(weights, "decode", counted)
    for peer in TEACHERS:
        client.teach(*published(peer))
        assert not any(reference() is not None for reference in loaded[-1])
    assert len(loaded) == 4
    client.train(list(TEACHERS), never)


def test_teaching_leaves_the_student_alone(tmp_path: Path) -> None:
    client = opened(tmp_path)
    before = client.snapshot()
    client.teach(*published(1))
    assert client.snapshot() == before


def test_a_teacher_that_must_not_be_used(tmp_path: Path) -> None:
    client = opened(tmp_path)
    client.teach(*published(1))
    manifest, snapshot = published(2)

    def damaged(name: str, value: float) -> bytes:
        tensors = weights.decode(snapshot)
        tensors[name].view(-1)[0] = value
        return weights.encode(tensors)

    values = (
        damaged("classifier.bias", float("nan")),
        damaged("classifier.bias", 1e7),  # logits stay finite
        damaged("bn1.running_var", -1.0),
        damaged("bn1.num_batches_tracked", -1),
    )
    for bad in (*values, snapshot[:-1], published(5)[1], b""):
        with pytest.raises(SnapshotError):
            client.teach(manifest, bad)
    client.train([1], never)
    assert client.snapshot() == after_round(tmp_path / "other", [1], [1])


def hostile_snapshot() -> bytes:
    """Weights within the bounds and finite logits on noise, but not where nine dark pixels lie together."""
    model = build_model("cnn6@0.1", classes=CLASSES, channels=1)
    tensors = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for name, value in tensors.items():
        if name == "convolutions.0.weight":
            value.fill_(-1)
        elif name == "norms.0.bias":
            value.fill_(-17)
        elif name.endswith("weight"):
            value.fill_(1 if name == "norms.0.weight" else 1e6)
        elif name == "norms.0.running_var":
            value.fill_(1)
    return weights.encode(tensors)


def test_a_teacher_that_is_not_finite_on_real_images_only(tmp_path: Path) -> None:
    """It would pass every other check, and then no learning rate would help the student."""
    data = dataset()
    data.train.images[7] = 0
    client = Client(federation(), 3, data, SPLIT, device=CPU, folder=tmp_path)
    client.initialise()
    client.open_round()
    client.teach(*published(1))
    manifest, snapshot = published(5)[0].model_copy(update={"arch": "cnn6@0.1"}), hostile_snapshot()
    for peer in (1, 5):  # 1 has taught already
        with pytest.raises(SnapshotError, match="predictions on this peer's images are not finite"):
            client.teach(manifest.model_copy(update={"peer": peer}), snapshot)
    with pytest.raises(KeyError):
        client.train([1], never)
    client.teach(*published(1))
    assert client.train([1], never).redone == 0


def test_a_round_must_be_open(tmp_path: Path) -> None:
    client = opened(tmp_path)
    client.train([], never)
    with pytest.raises(RuntimeError, match="open_round"):
        client.teach(*published(1))
    with pytest.raises(RuntimeError, match="open_round"):
        client.train([], never)
    client.open_round()
    with pytest.raises(KeyError):
        client.train([1], never)  # it did not teach this round
    client.teach(*published(1))
    client.open_round()  # once more from the start
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with pytest.raises(KeyError):
        client.train([1], never)


def test_progress_is_told_phase_by_phase(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    client = Client(
        federation(), 3, dataset(), SPLIT, device=CPU, folder=tmp_path, progress=lambda *step: told.append(step)
    )
    client.initialise()
    client.open_round()
    client.teach(*published(1))
    client.train([1], never)
    client.validate()
    client.evaluate(client.snapshot())
    training = [("train", step, 6) for step in range(1, 7)]
    assert told == [("teachers", 43, 43), *training, ("validate", 0, 1), ("evaluate", 0, 1)]


def test_the_scratch_folder_is_empty_after_training_and_gone_after_closing(tmp_path: Path) -> None:
    client = opened(tmp_path / "scratch")
    client.teach(*published(1))
    assert [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
    client.train([1], never)
    assert not [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
    client.close()
    assert not (tmp_path / "scratch").exists()
