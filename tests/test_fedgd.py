"""FedGD: images made from models, what is learned from them, and what peers publish from round to round."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from test_methods import ARCHS, CLASSES, CPU, SPLIT, dataset, digests, federation, manifest_of, run
from torch import Tensor, nn

from crad_p2p import synthesis, transfer, weights
from crad_p2p.architectures import build_model, initialise
from crad_p2p.client import Client
from crad_p2p.data.epoch import draw_epoch, plain_batches
from crad_p2p.federation import Federation
from crad_p2p.footprint import kept_by_generator, kept_by_step, kept_for_backward
from crad_p2p.methods.build import build_method, layouts_of
from crad_p2p.methods.interface import Digest, Lesson, Student
from crad_p2p.randomness import generator
from crad_p2p.sgd import Sgd
from crad_p2p.snapshot import SnapshotError, file_bytes
from crad_p2p.synthesis import Matching, begin, classes_held, make_images

SIZE = 8  # images of all: three each of the peers 0 and 3, two of peer 7
OWN = {"first": 1, "every": 3, "images": SIZE, "steps": 1}
#: What is published in rounds 0 to 5.
KINDS = ["model_digest", "images", "predictions", "predictions", "images", "predictions"]


def settings(own: dict[str, Any] | None = None, **fields: Any) -> Federation:
    method = {"name": "fedgd", "fedgd": {**OWN, **(own or {})}, **fields.pop("method", {})}
    return federation(method, **{"rounds": 5, **fields})


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(0, 2, shape)).float()


def model_of(arch: str, channels: int = 1, seed: int = 3) -> nn.Module:
    """In eval mode, its running statistics not those of a new one."""
    model = build_model(arch, classes=CLASSES, channels=channels)
    initialise(model, seed)
    rng = np.random.default_rng(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean += torch.from_numpy(rng.normal(0, 0.5, module.num_features)).float()
            module.running_var += torch.from_numpy(rng.random(module.num_features)).float()
    return model.eval().requires_grad_(False)


def made(
    model: nn.Module, count: int, classes: Sequence[int] = (0, 2), shape: Sequence[int] = (1, 8, 8), **changes: Any
):
    given = {"steps": 1, "batch_size": 4, "seed": 1, "peer": 2, "round_number": 3, **changes}
    channels = len(range(shape[0]))
    return make_images(
        model, count, classes, image_shape=shape, mean=[0.4] * channels, std=[0.3] * channels, device=CPU, **given
    )


# -------------------------------------------------------------------------------------------------- how images are made


def test_the_distance_of_the_batch_norms_against_a_second_reading() -> None:
    model, x = model_of("cnn6@0.125"), drawn(5, 1, 8, 8)
    expected = 0.0
    with Matching(model) as matching:
        model(x)
        found = float(matching.loss())
    h = x.double()
    for index, (convolution, norm) in enumerate(zip(model.convolutions, model.norms, strict=True)):
        h = F.conv2d(h, convolution.weight.double(), padding=1)
        values = h.transpose(0, 1).reshape(h.shape[1], -1)
        mean = values.sum(1) / values.shape[1]
        variance = ((values - mean[:, None]) ** 2).sum(1) / values.shape[1]
        expected += float(((mean - norm.running_mean) ** 2).sum() ** 0.5)
        expected += float(((variance - norm.running_var) ** 2).sum() ** 0.5)
        scale = norm.weight.double() / (norm.running_var.double() + norm.eps) ** 0.5
        h = F.relu((h - norm.running_mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None])
        h = F.max_pool2d(h, 2) if index in (1, 3) else h
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("arch", ARCHS.values())
def test_every_batch_norm_counts_once_and_nothing_is_left_hanging(arch: str) -> None:
    model = model_of(arch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    with Matching(model) as matching:
        model(drawn(3, 1, 8, 8))
        assert len(matching._distances) == len(norms) > 5
        first = matching.loss()
        model(drawn(3, 1, 8, 8))
        assert matching.loss() == first  # not of both passes
    made(model, 3)
    assert not any(norm._forward_pre_hooks for norm in norms)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_images_that_were_trained_for_are_nearer_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of all steps the best are kept: more of them never give worse ones."""
    model, data = model_of("resnet18@0.125").train(), dataset()
    for _ in range(50):  # running statistics as of images that there are
        model((torch.from_numpy(data.train.images[:64]).float() / 255 - 0.4) / 0.3)
    model.eval()

    def loss_of(images: Tensor) -> float:
        with Matching(model) as matching, torch.no_grad():
            model((images.float() / 255 - 0.4) / 0.3)
            return float(matching.loss())

    found = [loss_of(made(model, 4, (1,), steps=steps, batch_size=4)) for steps in (0, 30)]
    assert found[1] < 0.9 * found[0]
    monkeypatch.setattr(synthesis, "GENERATOR_RATE", 50.0)
    monkeypatch.setattr(synthesis, "NOISE_RATE", 50.0)
    spoiled = loss_of(made(model, 4, (1,), steps=5))
    assert spoiled == pytest.approx(found[0])


def test_a_loss_that_is_no_number_still_gives_images() -> None:
    model = model_of("cnn6@0.125")
    model.classifier.weight.fill_(float("nan"))
    images = made(model, 4, steps=2)
    assert images.float().std() > 10


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 14), (3, 28, 28), (1, 5, 30)])
@pytest.mark.parametrize("count", [1, 6])
def test_images_have_the_shape_of_the_data_and_all_its_values(shape: tuple[int, int, int], count: int) -> None:
    images = made(model_of("cnn6@0.125", shape[0]), count, shape=shape)
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (count, *shape))
    assert images.float().std() > 10
    assert images.amax() > 160
    assert images.amin() < 90


def test_images_are_drawn_by_seed_peer_and_round_and_by_nothing_else() -> None:
    model = model_of("cnn6@0.125")
    before = torch.get_rng_state()
    first = made(model, 6)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert torch.equal(made(model, 6), first)
    for changed in ({"seed": 2}, {"peer": 3}, {"round_number": 4}):
        assert not torch.equal(made(model, 6, **changed), first)
    assert len({bytes(image.numpy().tobytes()) for image in first}) == 6


def test_only_classes_that_a_peer_holds_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert classes_held([0, 1, 2, 3, 0], [9, 9, 9, 9, 0], 2) == (2, 3)
    assert classes_held([0, 1, 2, 3, 0], [9, 9, 9, 9, 0], 1) == (1, 2, 3)
    assert classes_held([1, 1, 0, 1, 0], [9, 8, 7, 6, 0], 2) == (0, 1, 2, 3)  # a shard too small for any
    asked: list[int] = []
    real = F.cross_entropy

    def note(logits: Tensor, targets: Tensor) -> Tensor:
        asked.extend(targets.tolist())
        return real(logits, targets)

    monkeypatch.setattr(F, "cross_entropy", note)
    made(model_of("cnn6@0.125"), 64, (1, 4), batch_size=64)
    assert set(asked) == {1, 4}


def test_a_peer_asks_for_its_own_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(tmp_path)
    validated = np.bincount(client._validation.labels.numpy(), minlength=client.classes)
    seen = []
    monkeypatch.setattr("crad_p2p.client.make_images", lambda *given, **_: seen.append(given[2]))
    client._paint(1)
    assert seen == [tuple(np.flatnonzero(validated >= 2))]
    client._paint(2)
    assert len(seen) == 1


# ---------------------------------------------------------------------------------------------- what is learned of them


def digest_of(predictions: Tensor | None, places: Tensor | None = None, **method: Any) -> Digest | None:
    lesson = Lesson(2, (), lambda _: torch.empty(0), lambda _: torch.empty(0), predictions, places)
    return build_method(settings(method=method), Student(CLASSES, 1, (1,) * CLASSES)).digest(lesson)


@pytest.mark.parametrize("weight", [1.0, 2.5])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_is_the_divergence_from_the_mean_posterior_times_the_square_of_the_temperature(
    weight: float, temperature: float
) -> None:
    predictions, z = drawn(3, 7, CLASSES), drawn(7, CLASSES, seed=2)
    digest = digest_of(predictions, temperature=temperature, fedgd={**OWN, "weight": weight})
    assert digest is not None
    assert digest.is_beside
    said = predictions.double().tolist()
    targets = [
        [
            reference.plain_mean(column)
            for column in zip(*(reference.softmax(p[b], temperature) for p in said), strict=True)
        ]
        for b in range(7)
    ]
    torch.testing.assert_close(digest.targets, torch.tensor(targets), rtol=1e-6, atol=1e-7)
    expected = weight * temperature**2 * reference.mean_kl(targets, z.double().tolist(), temperature)
    assert float(digest.loss(z, digest.targets)) == pytest.approx(expected, rel=1e-5)


def test_images_that_never_came_are_not_learned_from() -> None:
    assert digest_of(None) is None
    predictions, places = drawn(3, 7, CLASSES), torch.tensor([1, 2, 6])
    every, some = digest_of(predictions), digest_of(predictions, places)
    assert every is not None
    assert some is not None
    assert some.places.tolist() == [1, 2, 6]
    assert torch.equal(some.targets, every.targets[places])


def test_the_union_keeps_everybodys_places() -> None:
    first, last = torch.full((2, 1, 2, 2), 7, dtype=torch.uint8), torch.full((1, 1, 2, 2), 9, dtype=torch.uint8)
    images = transfer.union([(first, 2), (None, 3), (last, 1)], (1, 2, 2))
    assert images[:, 0, 0, 0].tolist() == [7, 7, 0, 0, 0, 9]
    assert transfer.places_there(images).tolist() == [0, 1, 5]


# -------------------------------------------------------------------------------------------------------------- clients


def client_of(folder: Path, peer: int = 7, *, is_new: bool = True, **fields: Any) -> Client:
    client = Client(settings(**fields), peer, dataset(), SPLIT, device=CPU, folder=folder)
    if is_new:
        client.initialise()
    return client


Files = tuple[bytes, bytes]


def one_round(clients: Sequence[Client], *, without: Sequence[int] = ()) -> list[Files]:
    """All learn from one another; ``without`` these, who learn all the same."""
    before = [(client.snapshot(), client.checkpoint()) for client in clients]
    for client, own in zip(clients, before, strict=True):
        number = client.round + 1
        client.open_round()
        teachers = client.federation.teachers_of(client.id, number)
        for other, (snapshot, _) in zip(clients, before, strict=True):
            if other.id in teachers and other.id not in without:
                manifest = manifest_of(other.id, other.arch).model_copy(update={"round": number - 1})
                client.teach(manifest, snapshot)
        client.train([peer for peer in teachers if peer not in without], lambda own=own: own)  # type: ignore[misc]
    return [(client.snapshot(), client.checkpoint()) for client in clients]


def all_clients(folder: Path, **fields: Any) -> list[Client]:
    return [client_of(folder / str(peer), peer, **fields) for peer in sorted(ARCHS)]


def test_what_is_published_round_by_round(tmp_path: Path) -> None:
    clients = all_clients(tmp_path)
    layouts = layouts_of(clients[0].federation, classes=clients[0].classes, image_shape=(1, 8, 8))
    parts: list[Tensor] = []
    for number in range(6):
        files = [(client.snapshot(), client.checkpoint()) for client in clients] if not number else one_round(clients)
        for client, (snapshot, checkpoint) in zip(clients, files, strict=True):
            tensors = weights.decode(snapshot)
            kind = client.federation.published_by(client.id, number)
            assert kind.partition("-")[0] == KINDS[number]
            assert transfer.tensors_in(snapshot, layouts[kind]).keys() == tensors.keys()
            assert len(snapshot) == file_bytes(layouts[kind])
            model = client.model.state_dict()
            if "model_digest" in tensors:
                assert torch.equal(tensors["model_digest"], transfer.digest_of_model(model))
            if KINDS[number] == "predictions":
                images = weights.decode(checkpoint)["transfer_set"]
                assert torch.equal(images, torch.cat(parts))  # in the order of the ids, and the same for all
                assert torch.equal(tensors["transfer_digest"], transfer.digest_of_images(images.numpy()))
                torch.testing.assert_close(
                    tensors["predictions"], logits_of(client.model, images.numpy()), rtol=1e-4, atol=1e-5
                )
        if KINDS[number] == "images":
            parts = [weights.decode(snapshot)["images"] for snapshot, _ in files]
            assert [len(part) for part in parts] == [3, 3, 2]


def logits_of(model: nn.Module, images: np.ndarray) -> Tensor:
    data, labels = dataset(), np.zeros(len(images), dtype=np.int64)
    plain = plain_batches(images, labels, batch_size=SIZE, mean=data.mean, std=data.std, device=CPU)
    with torch.no_grad():
        found: Tensor = copy.deepcopy(model).eval()(plain.pixels(slice(0, len(images))))
    return found


def test_a_round_by_hand(tmp_path: Path) -> None:
    """Cross-entropy on a batch of the own images, and T² KL on one of the synthetic ones, in the same step."""
    clients = all_clients(tmp_path, own={"weight": 0.7})
    for _ in range(2):
        files = one_round(clients)
    client = clients[2]
    model = copy.deepcopy(client.model)
    sgd = Sgd(dict(model.named_parameters()), 0.01, momentum=0.9, weight_decay=5e-4)
    sgd.buffers = {name: buffer.clone() for name, buffer in client._optimizer.buffers.items()}
    said = torch.stack([weights.decode(snapshot)["predictions"] for snapshot, _ in files])
    images = weights.decode(files[0][1])["transfer_set"].numpy()
    one_round(clients)

    target = torch.softmax(said / 3, -1).mean(0)
    data = dataset()
    local = draw_epoch(
        data.train.images[SPLIT.train],
        data.train.labels[SPLIT.train],
        batch_size=32,
        augmentation="crop",
        mean=data.mean,
        std=data.std,
        generator=generator(1024, "local epoch", peer=7, round_number=3),
        device=CPU,
    )
    draw = generator(1024, "transfer batches", peer=7, round_number=3)
    pixels = (torch.from_numpy(images).float() / 255 - torch.tensor(data.mean)[:, None, None]) / torch.tensor(data.std)[
        :, None, None
    ]
    model.train()
    for batch in local.batches:
        rows = torch.from_numpy(draw.permutation(SIZE))
        loss = F.cross_entropy(model(local.pixels(batch)), local.labels[batch])
        log_q = F.log_softmax(model(pixels[rows]) / 3, -1)
        loss = loss + 0.7 * 9 * (target[rows] * (target[rows].log() - log_q)).sum() / SIZE
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        sgd.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(client.model.state_dict()[name], value, rtol=1e-3, atol=1e-5)


def test_a_restart_after_any_round_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    clients = all_clients(tmp_path / "never")
    rounds = [[(client.snapshot(), client.checkpoint()) for client in clients]]
    for _ in range(5):
        rounds.append(one_round(clients))
    for number in range(5):
        again = [client_of(tmp_path / f"{number}" / str(peer), peer, is_new=False) for peer in sorted(ARCHS)]
        for client, files in zip(again, rounds[number], strict=True):
            client.restore(number, *files)
            assert (client.snapshot(), client.checkpoint()) == files
        assert one_round(again) == rounds[number + 1]
        found = clients[0].evaluate(*rounds[number][0])  # whatever is here meanwhile
        assert found == again[0].evaluate(*rounds[number][0])
        again[0].restore(number, *rounds[number][0])
        assert found == again[0].evaluate(rounds[number][0][0], again[0].kept_beside())


@pytest.mark.parametrize("number", [2, 3])
def test_a_round_that_diverges_is_redone_with_the_same_images(tmp_path: Path, number: int) -> None:
    """The one in which they are put together, and one that learns from them."""
    redone, slow = (
        all_clients(tmp_path / "redone"),
        all_clients(tmp_path / "slow", training={"batch_size": 32, "learning_rate": 0.001}),
    )
    for _ in range(number - 1):
        one_round(redone)
    for one, other in zip(redone, slow, strict=True):
        one._optimizer.buffers.clear()
        other.restore(number - 1, one.snapshot(), one.checkpoint())
        reasons = iter(["the loss is nan", None])
        one._divergence = lambda _, reasons=reasons: next(reasons)  # type: ignore[method-assign,misc]
        one._warn = lambda _: None
    assert one_round(redone) == one_round(slow)


def test_another_model_or_transfer_set_is_never_gone_on_with(tmp_path: Path) -> None:
    clients = all_clients(tmp_path)
    client, rounds = clients[0], [one_round(clients)[0] for _ in range(5)]
    digest_only, images = (
        (client_of(tmp_path / "new", 0).snapshot(), client_of(tmp_path / "new", 0).checkpoint()),
        rounds[0],
    )
    for number, (snapshot, _), checkpoint, what in (
        (0, digest_only, images[1], "the model in its checkpoint has sha256 [0-9a-f]{12}…, and [0-9a-f]{12}… was"),
        (1, images, digest_only[1], "the model in its checkpoint has sha256"),
        (1, images, weights.encode({}), "its checkpoint holds no model, which method fedgd keeps there"),
        (2, rounds[1], images[1], "its checkpoint holds no transfer set, and predictions of one were published"),
        (5, rounds[4], rounds[3][1], "the transfer set in its checkpoint has sha256"),
        (3, rounds[2], rounds[1][1], "the model in its checkpoint does not say what was published"),
    ):
        with pytest.raises(SnapshotError, match=what):
            client.restore(number, snapshot, checkpoint)
        with pytest.raises(SnapshotError, match=what):
            client.evaluate(snapshot, checkpoint)
    with pytest.raises(SnapshotError, match="it does not hold 'model_digest' alone, uint8"):
        client.restore(0, *images)  # of another round


def test_what_cannot_be_is_not_used(tmp_path: Path) -> None:
    clients = all_clients(tmp_path)
    one_round(clients)
    client, digest = clients[2], torch.zeros(32, dtype=torch.uint8)
    client.open_round()
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    published = manifest_of(0, ARCHS[0]).model_copy(update={"round": 1})
    for tensors in (
        {"images": images[:2], "model_digest": digest},
        {"images": images.float(), "model_digest": digest},
        {"images": images},
        {"predictions": torch.zeros(SIZE, client.classes), "transfer_digest": digest},
    ):
        with pytest.raises(SnapshotError, match="it does not hold 'images' and 'model_digest' alone, uint8"):
            client.teach(published, weights.encode(tensors))
    with pytest.raises(SnapshotError, match="it holds 'model_digest' alone, from which nobody can learn"):
        client.teach(published.model_copy(update={"round": 0}), weights.encode({"model_digest": digest}))
    clients = all_clients(tmp_path / "again")
    for _ in range(2):
        one_round(clients)
    clients[2].open_round()
    other = {"predictions": torch.zeros(SIZE, client.classes), "transfer_digest": digest}
    with pytest.raises(SnapshotError, match=r"the transfer set here has sha256 [0-9a-f]{12}…, and 000000000000… was"):
        clients[2].teach(published.model_copy(update={"round": 2}), weights.encode(other))


def test_images_of_a_peer_that_did_not_come_leave_a_gap(tmp_path: Path) -> None:
    clients = all_clients(tmp_path)
    one_round(clients)
    one_round(clients, without=[0])
    images = weights.decode(clients[2].checkpoint())["transfer_set"]
    assert transfer.places_there(images.numpy()).tolist() == [3, 4, 5, 6, 7]
    own = weights.decode(clients[0].checkpoint())["transfer_set"]
    assert transfer.places_there(own.numpy()).tolist() == list(range(SIZE))
    with pytest.raises(SnapshotError, match="the transfer set here has sha256"):  # and no prediction on it is used
        one_round(clients)


# ----------------------------------------------------------------------------------------------------------- whole runs


def test_a_run() -> None:
    summary, history = run(settings(), workers=2)
    assert summary.method == "fedgd"
    loss = {(each.round, each.peer): each.train_loss for each in history}
    private = {(r.round, r.peer): r.train_loss for r in run(federation({"name": "local"}, rounds=3))[1]}
    for peer in ARCHS:
        assert [loss[r, peer] == private[r, peer] for r in (1, 2, 3)] == [True, True, False]
        assert [record.teachers != () for record in history if record.peer == peer] == [False, True, True, True, True]
    assert digests(run(settings(rounds=3))[1]).items() <= digests(history).items()  # nothing depends on what is to come
    assert all(peer.global_accuracy is not None for peer in summary.peers)


def test_the_parts_of_the_peers() -> None:
    made = settings()
    assert {peer: made.images_of(peer) for peer in ARCHS} == {0: 3, 3: 3, 7: 2}
    assert made.transfer_size == SIZE
    assert [made.published_by(7, number) for number in range(6)] == [k if k != "images" else "images-2" for k in KINDS]
    assert made.kinds_of(0) == {"model_digest", "images-3", "predictions"}
    assert [made.teachers_of(7, number) for number in range(4)] == [(), (), (0, 3), (0, 3)]
    layouts = layouts_of(made, classes=CLASSES, image_shape=(3, 9, 8))
    assert set(layouts) == {"model_digest", "images-2", "images-3", "predictions", *ARCHS.values()}
    assert layouts["images-3"]["images"] == ("U8", (3, 3, 9, 8))
    assert layouts["predictions"]["predictions"] == ("F32", (SIZE, CLASSES))


def test_the_size_of_a_file_is_known_beforehand() -> None:
    layouts = layouts_of(settings(), classes=10, image_shape=(3, 9, 7))
    dtypes = {"U8": torch.uint8, "F32": torch.float32, "I64": torch.int64}
    for layout in layouts.values():
        tensors = {name: torch.zeros(spec.shape, dtype=dtypes[spec.dtype]) for name, spec in layout.items()}
        assert file_bytes(layout) == len(weights.encode(tensors))


def test_the_memory_of_a_step_has_the_generator_and_the_synthetic_batch_in_it() -> None:
    net = begin((3, 28, 28), 1, CPU).train()
    own = {value.untyped_storage().data_ptr() for value in net.state_dict().values()}
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = net(torch.zeros(16, synthesis.NOISE))
    assert len(output) == 16
    expected = sum(size for address, size in kept.items() if address not in own)
    assert kept_by_generator((3, 28, 28), 16) == pytest.approx(expected, rel=0.1)
    batch = kept_for_backward(ARCHS[0], classes=CLASSES, image_shape=(1, 8, 8), batch_size=32)
    shared = {"classes": CLASSES, "image_shape": (1, 8, 8)}
    assert kept_by_step(federation({"name": "crad"}), ARCHS[0], **shared) == batch
    assert kept_by_step(settings(), ARCHS[0], **shared) == batch + max(batch, kept_by_generator((1, 8, 8), 32))
