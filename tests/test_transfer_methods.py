"""Methods whose peers publish predictions on a transfer set: formulas, traps, and what becomes of the model."""

from __future__ import annotations

import argparse
import copy
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from test_methods import ARCHS, CLASSES, CPU, SPLIT, dataset, digests, federation, manifest_of, run
from torch import Tensor

from crad_p2p import weights
from crad_p2p.client import Client
from crad_p2p.data.epoch import draw_epoch, plain_batches
from crad_p2p.data.partition import transfer_set
from crad_p2p.distillation import EpochLog
from crad_p2p.errors import ConfigurationError
from crad_p2p.federation import Federation
from crad_p2p.learner import Learner
from crad_p2p.manifest import Manifest
from crad_p2p.methods.build import build_method, layouts_of
from crad_p2p.methods.fedmd import consensus
from crad_p2p.methods.interface import Digest, Lesson, Student
from crad_p2p.methods.msfkd import select, selected_targets
from crad_p2p.randomness import generator
from crad_p2p.sgd import Sgd
from crad_p2p.snapshot import SnapshotError, TensorSpec
from launch.quick import Quick, federation_of

SIZE = 10
DATA = {"dataset": "digits", "samples": 300, "holdout": 0.4, "transfer_samples": SIZE}
NAMES = ["fedmd", "msfkd"]


def settings(method: dict[str, Any], **fields: Any) -> Federation:
    return federation(method, **{"data": DATA, **fields})


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(0, 2, shape)).float()


def digest_of(method: dict[str, Any], predictions: Tensor | None) -> Digest | None:
    lesson = Lesson(2, (), lambda _: torch.empty(0), lambda _: torch.empty(0), predictions)
    return build_method(settings(method), Student(CLASSES, 1, (1,) * CLASSES)).digest(lesson)


# ------------------------------------------------------------------------------------------------------------ formulas


@pytest.mark.parametrize("peers", [2, 3, 10])
def test_fedmd_is_the_mean_absolute_error_to_the_mean_of_all(peers: int) -> None:
    predictions, z = drawn(peers, 7, CLASSES), drawn(7, CLASSES, seed=2)
    digest = digest_of({"name": "fedmd", "temperature": 9.0}, predictions)
    assert digest is not None
    assert digest.places.tolist() == list(range(7))
    expected = reference.fedmd_loss(z.double().tolist(), predictions.double().tolist())
    assert float(digest.loss(z, digest.targets)) == pytest.approx(expected, rel=1e-6)


def test_the_consensus_of_fedmd_is_of_logits_and_not_of_what_they_become() -> None:
    """Logits have a scale, which a softmax takes away: one that is very sure outweighs those that are not."""
    predictions = torch.tensor([[[9.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]]])
    assert consensus(predictions).tolist() == [[3.0, pytest.approx(2 / 3)]]
    assert float(torch.softmax(predictions, -1).mean(0)[0, 0]) < 0.52
    assert consensus(predictions + 5).tolist() == [[8.0, pytest.approx(17 / 3)]]


@pytest.mark.parametrize("peers", [2, 3, 4, 9, 10])
@pytest.mark.parametrize(
    "own",
    [{}, {"keep_quantile": 0.0}, {"keep_quantile": 0.3}, {"keep_quantile": 1.0}, {"require_plurality": False}],
    ids=str,
)
def test_the_selection_and_the_target_of_msfkd(peers: int, own: dict[str, Any]) -> None:
    samples = 40
    predictions = drawn(peers, samples, CLASSES)
    predictions[:, :10, 2] += 3  # images of which most say the same
    digest = digest_of({"name": "msfkd", "temperature": 2.0, "msfkd": own}, predictions)
    assert digest is not None
    said = predictions.double().tolist()
    expected = [
        reference.msfkd_target([said[j][b] for j in range(peers)], temperature=2.0, **own) for b in range(samples)
    ]
    assert digest.places.tolist() == [b for b in range(samples) if expected[b] is not None]
    targets = [row for row in expected if row is not None]
    torch.testing.assert_close(
        digest.targets.double(), torch.tensor(targets, dtype=torch.float64), rtol=1e-6, atol=1e-7
    )
    z = drawn(len(targets), CLASSES, seed=3)
    loss = 4 * reference.mean_kl(targets, z.double().tolist(), 2.0)
    assert float(digest.loss(z, digest.targets)) == pytest.approx(loss, rel=1e-5)


def said(*classes: int, confidence: Sequence[float] = ()) -> Tensor:
    """Logits [N, 1, C] of peers that say these classes, as sure as that, or all alike."""
    rows = F.one_hot(torch.tensor(classes), CLASSES).float()
    return (rows * torch.tensor(confidence or [2.0] * len(classes))[:, None])[:, None]


@pytest.mark.parametrize(
    ("predictions", "kept"),
    [
        (said(1, 1, 3), [True, True, False]),
        (said(0, 1, 2), [False] * 3),  # all differ
        (said(0, 0, 1, 1, 2), [False] * 5),  # none has more than any other
        (said(0, 0, 1, confidence=[1, 2, 3]), [False, True, False]),
        (said(0, 0, 1, 2, 3, confidence=[1, 1, 4, 5, 6]), [False] * 5),  # most are the least sure
        (said(4, 4), [True, True]),
        (said(4, 4, confidence=[1, 2]), [False, True]),  # the median lies between
        (said(4, 4, 4, 4, confidence=[1, 2, 2, 3]), [False, True, True, True]),
    ],
)
def test_an_image_without_plurality_is_dropped(predictions: Tensor, kept: list[bool]) -> None:
    assert select(predictions)[:, 0].tolist() == kept
    places, targets = selected_targets(predictions, select(predictions), 1.0)
    assert places.tolist() == ([0] if any(kept) else [])
    assert bool(torch.isfinite(targets).all())
    assert bool(select(predictions, require_plurality=False).any())  # by confidence alone nothing is dropped


@pytest.mark.parametrize("name", NAMES)
def test_without_predictions_of_others_there_is_nothing_to_digest(name: str) -> None:
    assert digest_of({"name": name}, None) is None


# ---------------------------------------------------------------------------------------------------------- the clients


def client_of(folder: Path, method: dict[str, Any], *, is_new: bool = True, **fields: Any) -> Client:
    client = Client(settings(method, **fields), 7, dataset(), SPLIT, device=CPU, folder=folder)
    if is_new:
        client.initialise()
    return client


def published(peer: int, logits: Tensor) -> tuple[Manifest, bytes]:
    snapshot = weights.encode({"predictions": logits})
    manifest = manifest_of(peer, ARCHS[peer])
    sha256 = hashlib.sha256(snapshot).hexdigest()
    return manifest.model_copy(update={"size": len(snapshot), "sha256": sha256}), snapshot


OTHERS = [published(3, drawn(SIZE, CLASSES, seed=3)), published(0, drawn(SIZE, CLASSES, seed=4))]


def one_round(client: Client, others: Sequence[tuple[Manifest, bytes]] = ()) -> tuple[bytes, bytes]:
    before = client.snapshot(), client.checkpoint()
    client.open_round()
    for each in others:
        client.teach(*each)
    client.train([manifest.peer for manifest, _ in others], lambda: before)
    return client.snapshot(), client.checkpoint()


def transfer_images() -> np.ndarray:
    data, made = dataset(), settings({"name": "fedmd"})
    return data.train.images[transfer_set(data.train.labels, made.data, made.seed)]


def logits_of(model: torch.nn.Module) -> Tensor:
    data, images = dataset(), transfer_images()
    labels = np.zeros(len(images), dtype=np.int64)
    plain = plain_batches(images, labels, batch_size=SIZE, mean=data.mean, std=data.std, device=CPU)
    with torch.no_grad():
        found: Tensor = copy.deepcopy(model).eval()(plain.pixels(slice(0, SIZE)))
    return found


def test_what_is_published_is_what_the_model_says_of_the_plain_images(tmp_path: Path) -> None:
    client = client_of(tmp_path, {"name": "fedmd"})
    for number in range(3):
        tensors = weights.decode(client.snapshot())
        assert set(tensors) == {"predictions"}
        torch.testing.assert_close(tensors["predictions"], logits_of(client.model), rtol=1e-4, atol=1e-5)
        assert client.round == number
        one_round(client, OTHERS)


def test_a_round_of_fedmd_by_hand(tmp_path: Path) -> None:
    """First an epoch towards the mean of all, the own predictions among them, then one on the own images."""
    client = client_of(tmp_path, {"name": "fedmd"})
    one_round(client)
    model, own = copy.deepcopy(client.model), weights.decode(client.snapshot())["predictions"]
    sgd = Sgd(dict(model.named_parameters()), 0.01, momentum=0.9, weight_decay=5e-4)
    sgd.buffers = {name: buffer.clone() for name, buffer in client._optimizer.buffers.items()}
    snapshot, _ = one_round(client, OTHERS)

    target = (own + sum(weights.decode(each)["predictions"] for _, each in OTHERS)) / 3
    data, shared = dataset(), {"batch_size": 32, "mean": dataset().mean, "std": dataset().std, "device": CPU}
    draw = generator(1024, "transfer epoch", peer=7, round_number=2)
    transfer = draw_epoch(transfer_images(), np.arange(SIZE), augmentation="none", generator=draw, **shared)
    draw = generator(1024, "local epoch", peer=7, round_number=2)
    train = data.train.images[SPLIT.train], data.train.labels[SPLIT.train]
    local = draw_epoch(*train, augmentation="crop", generator=draw, **shared)
    model.train()
    for epoch, is_transfer in ((transfer, True), (local, False)):
        for batch in epoch.batches:
            logits, labels = model(epoch.pixels(batch)), epoch.labels[batch]
            loss = (logits - target[labels]).abs().mean() if is_transfer else F.cross_entropy(logits, labels)
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            sgd.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(client.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights.decode(snapshot)["predictions"], logits_of(model), rtol=1e-3, atol=1e-4)


def test_the_order_in_which_predictions_come_does_not_matter_and_their_owner_does(tmp_path: Path) -> None:
    found = []
    swapped = [(OTHERS[0][0], OTHERS[1][1]), (OTHERS[1][0], OTHERS[0][1])]
    for number, others in enumerate((OTHERS, OTHERS[::-1], OTHERS[:1], ())):
        found.append(one_round(client_of(tmp_path / str(number), {"name": "msfkd"}), others))
    assert found[0] == found[1]
    assert len(set(found)) == 3
    client = client_of(tmp_path / "heard", {"name": "msfkd"})
    client.open_round()
    for each in swapped:
        client.teach(*each)
    stacked = client._predictions_of([0, 3])
    for row, logits in zip(
        stacked, (drawn(SIZE, CLASSES, seed=3), drawn(SIZE, CLASSES, seed=4), client._said), strict=True
    ):
        torch.testing.assert_close(row, logits)  # ids 0, 3, 7


def test_images_that_are_dropped_are_not_trained_on(tmp_path: Path) -> None:
    """If all are, a round is that of a peer without others."""
    nobody_agrees = [published(peer, F.one_hot(torch.full((SIZE,), c), CLASSES) * 50.0) for peer, c in ((0, 0), (3, 1))]
    client, alone = (client_of(tmp_path / name, {"name": "msfkd"}) for name in ("client", "alone"))
    client._said = alone._said = F.one_hot(torch.full((SIZE,), 2), CLASSES) * 50.0
    assert one_round(client, nobody_agrees) == one_round(alone)


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ({"predictions": torch.zeros(SIZE - 1, CLASSES)}, "it does not hold 'predictions' alone, float32"),
        ({"predictions": torch.zeros(SIZE, CLASSES).double()}, "it does not hold 'predictions' alone"),
        ({"weights": torch.zeros(SIZE, CLASSES)}, "it does not hold 'predictions' alone"),
        ({"predictions": torch.zeros(SIZE, CLASSES), "more": torch.zeros(1)}, "it does not hold 'predictions' alone"),
        ({"predictions": torch.full((SIZE, CLASSES), float("nan"))}, "'predictions' holds values that are not finite"),
        ({"predictions": torch.full((SIZE, CLASSES), 1e7)}, "'predictions' holds values that are not finite or beyond"),
    ],
)
def test_predictions_that_cannot_be_are_not_used(tmp_path: Path, tensors: dict[str, Tensor], what: str) -> None:
    client = client_of(tmp_path, {"name": "fedmd"})
    client.open_round()
    with pytest.raises(SnapshotError, match=what):
        client.teach(manifest_of(0, ARCHS[0]), weights.encode(tensors))


# ----------------------------------------------------------------------------------------------- the model in its place


@pytest.mark.parametrize("name", NAMES)
def test_a_restart_goes_on_with_the_model_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    client = client_of(tmp_path / "first", {"name": name})
    files = [one_round(client), one_round(client, OTHERS)]
    following = one_round(client, OTHERS)
    again = client_of(tmp_path / "again", {"name": name}, is_new=False)  # as a process that was started again
    again.restore(2, *files[1])
    assert (again.snapshot(), again.checkpoint()) == files[1]
    assert one_round(again, OTHERS) == following
    found = again.evaluate(*files[0])
    expected = client_of(tmp_path / "expected", {"name": name})
    expected.restore(1, *files[0])
    assert found == again.evaluate(files[0][0], expected.kept_beside())
    test = expected._global_test
    hits = expected.model.eval()(test.pixels(slice(0, 60))).argmax(-1) == test.labels
    assert found.global_accuracy == pytest.approx(float(hits.float().mean()))


def test_another_model_than_the_one_that_spoke_is_never_gone_on_with(tmp_path: Path) -> None:
    client = client_of(tmp_path, {"name": "fedmd"})
    first, second = one_round(client), one_round(client, OTHERS)
    for use in (lambda *files: client.restore(2, *files), client.evaluate):
        with pytest.raises(
            SnapshotError, match="its checkpoint holds no model, which method fedmd keeps there and does"
        ):
            use(second[0], weights.encode({}))
        with pytest.raises(SnapshotError, match="model in its checkpoint does not say what was published"):
            use(second[0], first[1])
    with pytest.raises(SnapshotError, match="holds no model"):
        client.evaluate(second[0])


def test_a_round_that_diverges_is_redone_with_its_digest(tmp_path: Path) -> None:
    """From the same predictions, at the lower rate for both epochs: as if that had been there from the start."""
    client = client_of(tmp_path / "redone", {"name": "fedmd"})
    slow = client_of(tmp_path / "slow", {"name": "fedmd"}, training={"batch_size": 32, "learning_rate": 0.001})
    for each in (client, slow):
        one_round(each)
        each._optimizer.buffers.clear()
    slow.restore(1, client.snapshot(), client.checkpoint())
    reasons = iter(["the loss is nan", None])
    client._divergence = lambda _: next(reasons)  # type: ignore[method-assign]
    client._warn = lambda _: None
    assert one_round(client, OTHERS) == one_round(slow, OTHERS)


def test_predictions_that_nobody_would_take_are_not_published(tmp_path: Path) -> None:
    client = client_of(tmp_path, {"name": "fedmd"})
    assert client._divergence(EpochLog(loss=1.0)) is None
    client._said = torch.full((SIZE, CLASSES), 1e7)
    reason = client._divergence(EpochLog(loss=1.0))
    assert reason is not None
    assert "predictions" in reason


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("name", NAMES)
def test_a_run(name: str) -> None:
    made = settings({"name": name})
    summary, history = run(made, workers=2)
    assert summary.method == name
    alone = digests(run(settings({"name": name, "warmup_rounds": 2}))[1])
    found = digests(history)
    assert {key for key in found if found[key] == alone[key]} == {(1, peer) for peer in ARCHS}  # round 1 is private
    assert [record.teachers for record in history if record.peer == 3] == [(), (0, 7)]
    assert all(peer.global_accuracy is not None for peer in summary.peers)
    last = [record.global_accuracy for record in history if record.round == 2]
    if summary.best_round == 2:
        assert [peer.global_accuracy for peer in summary.peers] == last


def test_all_methods_have_the_same_shards_beside_a_transfer_set() -> None:
    """The first private round of each is the same, but for what is published."""
    losses = [
        [record.train_loss for record in run(settings({"name": name}, rounds=1))[1]]
        for name in ("local", "fedmd", "msfkd")
    ]
    assert losses[0] == losses[1] == losses[2]
    without = run(federation({"name": "local"}, rounds=1))[1]
    assert [record.train_loss for record in without] != losses[0]


@pytest.mark.parametrize("name", ["crad", "fedmd"])
def test_peers_notice_that_their_transfer_images_differ(tmp_path: Path, name: str) -> None:
    """By what they greet one another with, whatever the method: labels and shapes are the same."""
    images = dataset().train.images[:, 0]
    places = transfer_set(dataset().train.labels, settings({"name": name}).data, 1024)
    said = []
    elsewhere = np.setdiff1d(SPLIT.train, places)
    for number, changed in enumerate((None, places[3], elsewhere[0])):
        mine = images.copy()
        if changed is not None:
            mine[changed, 0, 0] ^= 1
        labels = dataset().train.labels
        path = tmp_path / f"{number}.npz"
        np.savez(path, train_images=mine, train_labels=labels, test_images=images[:9], test_labels=labels[:9])
        data = {**DATA, "dataset": f"npz:{path}", "samples": None, "partition": {"min_size": 1}}
        arguments = argparse.Namespace(
            id=7, device="cpu", precision="float32", data_dir=tmp_path, peers=tmp_path / "peers.yaml", download=False
        )
        arguments.scratch, arguments.count_key = tmp_path / "scratch", None
        events = io.StringIO()
        Learner(settings({"name": name}, data=data), arguments, events)
        said.append(json.loads(events.getvalue())["partition_digest"])
    assert said[0] != said[1]
    assert said[0] == said[2]  # of own images nobody is told anything


def test_a_transfer_set_from_the_command_line() -> None:
    quick = Quick(method="fedmd", transfer_samples=50)
    assert quick.given() == ["--method", "--transfer-samples"]
    assert federation_of(quick, ["127.0.0.1:1", "127.0.0.1:2"]).data.transfer_samples == 50
    with pytest.raises(ConfigurationError, match=r"data\.transfer_samples: it is missing, and method fedmd"):
        federation_of(Quick(method="fedmd"), ["127.0.0.1:1", "127.0.0.1:2"])


def test_the_layout_of_predictions() -> None:
    made = settings({"name": "msfkd"})
    layouts = layouts_of(made, classes=CLASSES, image_shape=(1, 8, 8))
    assert set(layouts) == {"predictions", *ARCHS.values()}
    assert layouts["predictions"] == {"predictions": TensorSpec("F32", (SIZE, CLASSES))}
    assert "predictions" not in layouts_of(settings({"name": "crad"}), classes=CLASSES, image_shape=(1, 8, 8))
