"""DFML as its source has it: one peer a round trains the models of all, and every peer takes its own up in the next."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from test_methods import ARCHS, CLASSES, CPU, SPLIT, dataset, digests, federation, manifest_of, run
from torch import Tensor

from crad_p2p import client as client_module
from crad_p2p import transfer, weights
from crad_p2p.architectures import build_model, initialise, parameter_count
from crad_p2p.client import Client
from crad_p2p.data.epoch import draw_epoch
from crad_p2p.errors import ConfigurationError, DivergedError, LearnerFailedError
from crad_p2p.federation import Federation
from crad_p2p.footprint import kept_by_step, kept_for_backward
from crad_p2p.methods.build import build_method, layouts_of
from crad_p2p.methods.dfml import alpha
from crad_p2p.methods.interface import Student
from crad_p2p.randomness import generator
from crad_p2p.sgd import Sgd
from crad_p2p.snapshot import MAX_HEADER_BYTES, SnapshotError, file_bytes, header_bytes
from crad_p2p.together import Together, bundle_of, parts_of, train_together

IDS = sorted(ARCHS)


def settings(own: Mapping[str, Any] | None = None, **fields: Any) -> Federation:
    method = {"name": "dfml", "dfml": {"mode": "aggregator", "period": 2, **(own or {})}}
    return federation(method, **{"rounds": 4, **fields})


def together(own: Mapping[str, Any], counts: Sequence[int], number: int, archs: Mapping[int, str] = ARCHS) -> Together:
    found = build_method(settings(own), Student(CLASSES, 1, tuple(counts))).together(number, archs)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------------ formulas


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_model_learns_from_the_labels_and_from_all_others(number: int, temperature: float) -> None:
    rng, own = np.random.default_rng(number), {"period": 6, "temperature": temperature}
    z = {peer: torch.from_numpy(rng.normal(0, 2, (6, CLASSES))) for peer in ARCHS}
    labels, counts = torch.from_numpy(rng.integers(0, CLASSES, 6)), [4, 1, 9, 2, 5]
    losses = together(own, counts, number)(z, labels)
    assert losses.keys() == ARCHS.keys()
    made = settings(own).method.dfml
    assert made is not None
    for peer in ARCHS:
        others = [each for each in ARCHS if each != peer]
        expected = reference.dfml_loss(
            z[peer].tolist(),
            labels.tolist(),
            [[reference.softmax(row, temperature) for row in z[each].tolist()] for each in others],
            [parameter_count(ARCHS[each], classes=CLASSES, channels=1) for each in others],
            counts,
            alpha=alpha(number, made),
            temperature=temperature,
        )
        assert float(losses[peer]) == pytest.approx(expected, rel=1e-6)


def test_no_gradient_reaches_another_model_and_no_class_without_images_is_pushed() -> None:
    z = {peer: torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(peer)).requires_grad_() for peer in IDS}
    losses = together({"alpha_min": 0.5, "alpha_max": 0.5}, [3, 3, 3, 3, 0], 1)(z, torch.tensor([0, 1, 2, 3]))
    losses[3].backward()
    assert z[3].grad is not None
    assert z[0].grad is None
    assert z[7].grad is None
    logits = {peer: value.detach().requires_grad_() for peer, value in z.items()}
    together({"alpha_max": 0.0}, [3, 3, 3, 3, 0], 1)(logits, torch.tensor([0, 1, 2, 3]))[3].backward()
    assert logits[3].grad is not None
    assert not logits[3].grad[:, 4].any()


def test_a_peer_alone_learns_from_its_labels() -> None:
    z, labels = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 2])
    loss = together({}, [1, 2, 3, 4, 5], 1, {7: ARCHS[7]})({7: z}, labels)[7]
    expected = reference.weighted_softmax_loss(z.double().tolist(), labels.tolist(), [1, 2, 3, 4, 5])
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_all_models_take_their_step_by_what_all_said_before_it() -> None:
    """Each with an optimiser of its own, without momentum at first, and its gradient cut by itself."""
    data, made = dataset(), settings(training={"batch_size": 32, "clip_norm": 0.5})
    counts = np.bincount(data.train.labels[SPLIT.train], minlength=10).tolist()
    method = build_method(made, Student(10, 1, tuple(counts)))
    objective = method.together(1, ARCHS)
    assert objective is not None
    models = {}
    for peer, arch in ARCHS.items():
        models[peer] = build_model(arch, classes=10, channels=1)
        initialise(models[peer], peer)
    by_hand = copy.deepcopy(models)
    epoch = draw_epoch(
        data.train.images[SPLIT.train],
        data.train.labels[SPLIT.train],
        batch_size=32,
        augmentation="crop",
        mean=data.mean,
        std=data.std,
        generator=generator(1024, "local epoch", peer=7, round_number=1),
        device=CPU,
    )
    for each in models.values():
        each.eval()
    log = train_together(models, epoch, objective, made.training, 0.02)
    sgd = {
        peer: Sgd(dict(each.named_parameters()), 0.02, momentum=0.9, weight_decay=5e-4)
        for peer, each in by_hand.items()
    }
    total = 0.0
    for batch in epoch.batches:
        said = {peer: each.train()(epoch.pixels(batch)) for peer, each in by_hand.items()}
        losses = objective(said, epoch.labels[batch])
        for peer, each in by_hand.items():
            each.zero_grad()
            losses[peer].backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            total += float(losses[peer].detach()) * len(epoch.labels[batch])
        for each in sgd.values():
            each.step()
    assert log.samples == len(SPLIT.train)
    assert log.loss == pytest.approx(total / (3 * len(SPLIT.train)))
    for peer, each in by_hand.items():
        for name, value in each.state_dict().items():
            torch.testing.assert_close(models[peer].state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_a_bundle_is_taken_apart_again() -> None:
    parts = {10: {"a.weight": 1, "b": 2}, 2: {"a.weight": 3}}
    assert list(bundle_of(parts)) == ["2.a.weight", "10.a.weight", "10.b"]
    assert parts_of({**bundle_of(parts), "model_digest": 4}) == parts


# ---------------------------------------------------------------------------------------------------------- whose turn


def test_everybody_trains_for_all_as_often_as_any_other() -> None:
    made = settings(rounds=20)
    turns = [made.aggregator(number) for number in range(22)]
    assert turns[0] is turns[20] is turns[21] is None
    for start in range(1, 18, 3):
        assert sorted(turns[start : start + 3]) == IDS  # type: ignore[type-var]
    assert len({tuple(turns[start : start + 3]) for start in range(1, 18, 3)}) > 1
    assert turns != [settings(rounds=20, seed=2).aggregator(number) for number in range(22)]
    assert turns[:7] == [settings(rounds=7).aggregator(number) for number in range(7)]
    assert federation({"name": "dfml"}).aggregator(1) is None


def test_what_is_published_and_who_sends_to_whom() -> None:
    made = settings(rounds=9)
    for number in range(10):
        one = made.aggregator(number)
        for peer in IDS:
            kind = made.published_by(peer, number)
            assert kind == (ARCHS[peer] if not number else "bundle" if peer == one else "model_digest")
            sender = made.aggregator(number - 1)
            senders = made.teachers_of(peer, number)
            if number > 1:
                assert senders == (() if sender == peer else (sender,))
            else:
                assert senders == (tuple(each for each in IDS if each != peer) if number and peer == one else ())
    layouts = layouts_of(made, classes=CLASSES, image_shape=(1, 8, 8))
    assert set(layouts) == {*ARCHS.values(), "bundle", "model_digest"}
    whole = layouts.pop("bundle")
    assert whole.pop("model_digest") == ("U8", (32,))
    assert parts_of(whole) == {peer: layouts[arch] for peer, arch in ARCHS.items()}


def test_a_file_of_too_many_models_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layouts_of(settings(), classes=10, image_shape=(1, 8, 8))["bundle"]
    monkeypatch.setattr("crad_p2p.methods.build.MAX_HEADER_BYTES", header_bytes(layout))
    layouts_of(settings(), classes=10, image_shape=(1, 8, 8))
    assert header_bytes(layout) < MAX_HEADER_BYTES
    monkeypatch.setattr("crad_p2p.methods.build.MAX_HEADER_BYTES", header_bytes(layout) - 1)
    with pytest.raises(
        ConfigurationError, match=r"method\.dfml\.mode: aggregator with 3 peers, whose models have \d+ te"
    ):
        layouts_of(settings(), classes=10, image_shape=(1, 8, 8))


# ------------------------------------------------------------------------------------------------------------- clients

Files = tuple[bytes, bytes]


def client_of(folder: Path, peer: int, *, is_new: bool = True, **fields: Any) -> Client:
    client = Client(settings(**fields), peer, dataset(), SPLIT, device=CPU, folder=folder)
    if is_new:
        client.initialise()
    return client


def all_clients(folder: Path, *, is_new: bool = True, **fields: Any) -> list[Client]:
    return [client_of(folder / str(peer), peer, is_new=is_new, **fields) for peer in IDS]


def files_of(clients: Sequence[Client]) -> list[Files]:
    return [(client.snapshot(), client.checkpoint()) for client in clients]


def one_round(clients: Sequence[Client]) -> list[Files]:
    before = files_of(clients)
    for client, own in zip(clients, before, strict=True):
        number = client.round + 1
        client.open_round()
        teachers = client.federation.teachers_of(client.id, number)
        for other, (snapshot, _) in zip(clients, before, strict=True):
            if other.id in teachers:
                client.teach(manifest_of(other.id, other.arch).model_copy(update={"round": number - 1}), snapshot)
        client.train(teachers, lambda own=own: own)  # type: ignore[misc]
    return files_of(clients)


def same(model: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return model.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in model.items())


def test_models_that_one_has_trained_are_taken_up_by_all_in_the_next_round(tmp_path: Path) -> None:
    clients = all_clients(tmp_path)
    made = clients[0].federation
    layouts = layouts_of(made, classes=clients[0].classes, image_shape=(1, 8, 8))
    bundle = {client.id: dict(client.model.state_dict()) for client in clients}  # the initial ones
    for number in range(1, 5):
        before = copy.deepcopy(bundle)
        for client, (snapshot, checkpoint) in zip(clients, one_round(clients), strict=True):
            assert client.round == number
            state = client.model.state_dict()
            assert same(state, before[client.id])  # whoever trained in the round before
            said = weights.decode(snapshot)
            assert torch.equal(said["model_digest"], transfer.digest_of_model(state))
            assert len(snapshot) == file_bytes(layouts[made.published_by(client.id, number)])
            assert not any(name.startswith("momentum.") for name in weights.decode(checkpoint))
            if made.aggregator(number) == client.id:
                bundle = parts_of(said)
                assert not any(same(bundle[peer], before[peer]) for peer in IDS)
            else:
                assert set(said) == {"model_digest"}
    assert all(same(bundle[peer], before[peer]) for peer in IDS)  # in the last round nobody trains


def test_a_restart_after_any_round_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    clients = all_clients(tmp_path / "never")
    rounds = [files_of(clients)] + [one_round(clients) for _ in range(4)]
    for number in range(4):
        again = all_clients(tmp_path / str(number), is_new=False)
        for client, files in zip(again, rounds[number], strict=True):
            client.restore(number, *files)
            assert (client.snapshot(), client.checkpoint()) == files
        assert one_round(again) == rounds[number + 1]
        for client, files in zip(again, rounds[number], strict=True):
            found = client.evaluate(*files)
            client.restore(number, *files)
            assert found == client.evaluate(files[0], client.kept_beside())


def test_another_model_is_never_gone_on_with(tmp_path: Path) -> None:
    clients = all_clients(tmp_path)
    rounds = [files_of(clients)] + [one_round(clients) for _ in range(3)]
    place = next(place for place, client in enumerate(clients) if client.federation.aggregator(2) == client.id)
    files = [each[place] for each in rounds]
    for number, checkpoint in ((0, files[3][1]), (2, files[3][1]), (3, files[2][1])):
        for use in (lambda *given: clients[place].restore(number, *given), clients[place].evaluate):  # noqa: B023
            with pytest.raises(SnapshotError, match="the model in its checkpoint has sha256"):
                use(files[number][0], checkpoint)
    with pytest.raises(SnapshotError, match="its checkpoint holds no model, which method dfml keeps there"):
        clients[place].restore(2, files[2][0], weights.encode({}))


def test_models_that_cannot_be_end_the_run_wherever_they_come(tmp_path: Path) -> None:
    """One model of a bundle is enough, whosever it is: else the peers would go on with different ones."""
    clients = all_clients(tmp_path)
    before, after = files_of(clients), one_round(clients)
    made = clients[0].federation
    sender = made.aggregator(1)
    assert sender is not None
    tensors = weights.decode(after[IDS.index(sender)][0])
    victim = min(peer for peer in IDS if peer != sender)
    classifier = tensors[f"{victim}.classifier.bias"]
    manifest = manifest_of(sender, ARCHS[sender]).model_copy(update={"round": 1})
    for client in clients:
        if client.id == sender:
            continue
        client.open_round()
        for changed, what in (
            ({f"{victim}.classifier.bias": classifier * float("nan")}, "holds values that are not finite"),
            ({f"{victim}.classifier.bias": classifier.double()}, "it does not hold"),
            ({f"{victim}.more": classifier.clone()}, "it does not hold"),
        ):
            with pytest.raises(SnapshotError, match=what):
                client.teach(manifest, weights.encode({**tensors, **changed}))
        (other,) = (peer for peer in IDS if peer not in (sender, client.id))
        idle = manifest_of(other, ARCHS[other]).model_copy(update={"round": 1})
        with pytest.raises(SnapshotError, match="it holds 'model_digest' alone, from which nobody can learn"):
            client.teach(idle, after[IDS.index(other)][0])
        with pytest.raises(LearnerFailedError, match=rf"after round 1: what came from peer {sender} is not used"):
            client.train([], lambda: pytest.fail("nothing was trained"))
    first = client_of(tmp_path / "first", sender)
    first.open_round()
    there, lacking = (peer for peer in IDS if peer != sender)
    first.teach(manifest_of(there, ARCHS[there]), before[IDS.index(there)][0])
    with pytest.raises(LearnerFailedError, match=rf"after round 0: what came from peer {lacking} is not used"):
        first.train([there], lambda: pytest.fail("nothing was trained"))


def test_values_that_would_poison_all_are_seen_in_a_pass(tmp_path: Path) -> None:
    clients = all_clients(tmp_path)
    after, sender = one_round(clients), clients[0].federation.aggregator(1)
    assert sender is not None
    tensors = weights.decode(after[IDS.index(sender)][0])
    for name in tensors:
        if name.startswith("0.") and name.endswith("running_var"):
            tensors[name].zero_()
        if name.startswith("0.") and name.endswith("weight") and tensors[name].ndim == 1:  # of the batch norms
            tensors[name].fill_(1e6)
    client = next(client for client in clients if client.id not in (0, sender))
    client.open_round()
    with pytest.raises(SnapshotError, match="the model of peer 0: a probe batch gives logits that are not finite"):
        client.teach(manifest_of(sender, ARCHS[sender]).model_copy(update={"round": 1}), weights.encode(tensors))


@pytest.mark.parametrize("reason", ["the loss is nan", "the model of peer 0: no finite logits"])
def test_training_that_diverges_is_redone_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    redone, slow = (
        all_clients(tmp_path / "redone"),
        all_clients(tmp_path / "slow", training={"batch_size": 32, "learning_rate": 0.001}),
    )
    sender, said = redone[0].federation.aggregator(1), list[str]()
    place = IDS.index(sender) if sender is not None else -1
    redone[place]._warn = said.append
    expected = one_round(slow)
    if "loss" in reason:
        reasons = iter([reason, None])
        monkeypatch.setattr(client_module, "_loss_divergence", lambda _: next(reasons))
    else:
        probed = list[Any]()

        def probe(models: Any) -> None:
            probed.append(models)
            if len(probed) == 3:  # after those of the two others, which came
                raise SnapshotError(reason)

        redone[place]._probe_all = probe  # type: ignore[method-assign]
    found = one_round(redone)
    assert [snapshot for snapshot, _ in found] == [snapshot for snapshot, _ in expected]
    assert said == [
        f"round 1: training diverged ({reason}); redone from round 0 at learning rate 0.001, attempt 1 of 3"
    ]
    monkeypatch.undo()
    wild = all_clients(tmp_path / "wild", training={"batch_size": 32, "learning_rate": 1e30})
    wild[place]._warn = lambda _: None
    with pytest.raises(
        DivergedError, match=rf"peer {sender}: training of round 1 diverged at each of the learning rates"
    ):
        one_round(wild)


# ---------------------------------------------------------------------------------------------------------- whole runs


def test_a_run() -> None:
    made = settings()
    summary, history = run(made, workers=2)
    assert digests(run(made)[1]) == digests(history)
    for record in history:
        trains = made.aggregator(record.round) == record.peer
        assert (record.train_loss is not None) == trains
        assert record.teachers == made.teachers_of(record.peer, record.round)
    # Alpha is largest in rounds 1 and 3, whose models are taken up in rounds 2 and 4.
    for peer in IDS:
        mine = [record for record in history if record.peer == peer]
        peaks = [record.peak_global_accuracy for record in mine]
        own = [record.global_accuracy for record in mine]
        assert peaks == [own[0], own[1], own[1], own[3]]
    assert summary.best_round is not None
    assert all(peer.peak_global_accuracy is not None for peer in summary.peers)


def test_the_memory_of_a_step_is_that_of_all_models() -> None:
    shared = {"classes": 10, "image_shape": (1, 8, 8)}
    batches = [kept_for_backward(arch, batch_size=32, **shared) for arch in ARCHS.values()]
    assert {kept_by_step(settings(), arch, **shared) for arch in ARCHS.values()} == {sum(batches)}
