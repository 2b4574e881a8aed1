"""One client: its shard, its model, and the steps of a round. The simulation and the learner process run this same
code.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crad_p2p import privacy, transfer, weights
from crad_p2p.architectures import build_model, initialise
from crad_p2p.data.datasets import Dataset, ImageSet
from crad_p2p.data.epoch import LocalEpoch, draw_epoch, plain_batches
from crad_p2p.data.partition import Split, transfer_set
from crad_p2p.distillation import EpochLog, Objective, Step, train_epoch
from crad_p2p.errors import DivergedError, LearnerFailedError
from crad_p2p.federation import BUNDLE, IMAGES, MODEL_DIGEST, PREDICTIONS, Federation
from crad_p2p.frozen import Forward, frozen
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.methods.build import build_method, layouts_of
from crad_p2p.methods.interface import Digest, Lesson, Student
from crad_p2p.randomness import generator, torch_seed
from crad_p2p.sgd import Sgd
from crad_p2p.snapshot import SnapshotError
from crad_p2p.statistics import measure
from crad_p2p.synthesis import classes_held, make_images
from crad_p2p.teachers import PosteriorStore, inference_batch
from crad_p2p.together import bundle_of, parts_of, train_together

#: Called with (phase, steps done, steps in all).
PhaseProgress = Callable[[str, int, int], None]

#: Gives snapshot and checkpoint of the last good round.
LastGood = Callable[[], tuple[bytes, bytes]]

logger = logging.getLogger(__name__)

#: How often a round whose training diverged is redone before the client gives up.
MAX_REDONE = 3
#: Each time at a learning rate lower by this factor. How far the configured one is too high, nobody knows: three steps
#: of ten reach down to a thousandth, three halvings only to an eighth.
_SLOW_DOWN = 10.0

#: Before the names of a checkpoint's tensors.
_MOMENTUM, _METHOD, _MODEL = "momentum.", "method.", "model."
#: The name of another one there: a transfer set that the peers have made.
_TRANSFER = "transfer_set"


@dataclass(frozen=True)
class Evaluation:
    """Test accuracies of one model, as fractions; None where there is no sample. Those of a peak are None for methods
    that have none.
    """

    global_accuracy: float | None
    global_accuracy_per_class: tuple[float | None, ...]
    local_accuracy: float | None
    peak_global_accuracy: float | None = None
    peak_local_accuracy: float | None = None


class Client:
    """A peer's model and data. Of the data set it keeps its own shard and the test set.

    A round is ``open_round``, ``teach`` for every teacher in any order, ``train``, ``validate``; then
    :meth:`snapshot` and :meth:`checkpoint` are what must be stored before the round counts as done.
    """

    def __init__(
        self,
        federation: Federation,
        peer_id: int,
        dataset: Dataset,
        split: Split,
        *,
        device: torch.device,
        precision: torch.dtype = torch.float32,
        folder: Path,
        count_key: bytes | None = None,
        progress: PhaseProgress = lambda *_: None,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        """
        Args:
            precision: in which teachers compute: float32 or bfloat16.
            folder: a scratch folder of this client alone: its contents may be lost at any time between two rounds.
            count_key: secret of the noise on the counts; needed where the federation has such noise, unless
                :meth:`restore` is told the counts that have been published.
            warn: called with a sentence when a round has to be redone.
        """
        self.federation = federation
        self.id = peer_id
        self.arch = federation.peer(peer_id).arch
        self.classes = len(dataset.class_names)
        self.device = device
        self._precision = precision
        self.round = 0
        self._image_shape = dataset.train.images.shape[1:]
        self._mean, self._std, self._augmentation = dataset.mean, dataset.std, dataset.augmentation
        self._train = _subset(dataset.train, split.train)
        self._validation = self._plain(_subset(dataset.train, split.validation))
        self._test = self._plain(_subset(dataset.train, split.test))
        self._global_test = self._plain(dataset.test)
        # For methods whose peers keep their models to themselves, and speak of a transfer set; None until there is one.
        self._keeps_model = federation.method.keeps_model
        self._transfer: NDArray[np.uint8] | None = None
        if federation.transfer_size and federation.method.making is None:
            self._transfer = dataset.train.images[transfer_set(dataset.train.labels, federation.data, federation.seed)]
        self._said = torch.empty(0)  # what was published last of it
        self._images = torch.empty(0)  # the own part that was published last, where the peers make it
        self._heard: dict[int, Tensor] = {}  # what the others published last: predictions, or their parts
        # Where one trains for all: the models that it has trained, and those that came in the open round.
        self._bundle: dict[int, dict[str, Tensor]] = {}
        self._came: dict[int, dict[int, dict[str, Tensor]]] = {}
        self._folder = folder
        self._count_key = count_key
        self._noised_counts: tuple[int, ...] | None = None  # of the whole run, once they are known
        self._progress = progress
        self._warn = warn
        self._open = 0  # the number of the open round
        self._epoch: LocalEpoch | None = None
        self._posteriors: PosteriorStore | None = None
        self._teachers: dict[int, Manifest] = {}
        channels, height, width = self._image_shape
        # Now, while nothing else is computed in this process.
        self._architectures = {
            peer.arch: frozen(peer.arch, self.classes, (channels, height, width)) for peer in federation.peers
        }
        self.model = build_model(self.arch, classes=self.classes, channels=self._image_shape[0], device=device)
        self._layouts = layouts_of(federation, classes=self.classes, image_shape=self._image_shape)
        self._optimizer = Sgd(
            dict(self.model.named_parameters()),
            federation.training.learning_rate,
            momentum=federation.training.momentum,
            weight_decay=federation.training.weight_decay,
        )
        label_counts = np.bincount(self._train.labels, minlength=self.classes)
        self._method = build_method(federation, Student(self.classes, channels, tuple(label_counts.tolist())))

    @property
    def train_samples(self) -> int:
        """Images this client trains on."""
        return len(self._train.labels)

    # --- a round ---------------------------------------------------------------------------------------------------

    def initialise(self) -> None:
        """Round 0: start values from a seed of this peer's own."""
        model = build_model(self.arch, classes=self.classes, channels=self._image_shape[0])
        initialise(model, torch_seed(self.federation.seed, "initial model", peer=self.id))
        self.model.load_state_dict(model.state_dict())
        self._method.restore({})
        self._speak(0)
        self.round = 0

    def restore(
        self, round_number: int, snapshot: bytes, checkpoint: bytes, counts: Sequence[int] | None = None
    ) -> None:
        """Go on after a committed round.

        Args:
            counts: the class counts that were published with it. Where the federation has noise on them they stay,
                whatever the secret is now: one that was lost with a disk must not lead to a second draw.

        Raises:
            SnapshotError: the files do not fit this client's architecture, or one another.
        """
        kept = weights.decode(checkpoint)
        tensors = self._model_in(snapshot, kept)
        state = _with_prefix(kept, _METHOD)
        others = (_METHOD, _MODEL, _TRANSFER)
        momentum = {name: buffer for name, buffer in kept.items() if not name.startswith(others)}
        shapes = {_MOMENTUM + name: parameter.shape for name, parameter in self.model.named_parameters()}
        if momentum and {name: buffer.shape for name, buffer in momentum.items()} != shapes:
            raise SnapshotError(f"checkpoint of round {round_number} is not of {self.arch}")
        try:
            self.model.load_state_dict(tensors)
        except RuntimeError as error:
            raise SnapshotError(f"snapshot of round {round_number} is not of {self.arch}: {error}") from None
        if self._keeps_model:
            self._transfer = self._transfer_in(kept)
            said = self._spoken(snapshot, self.federation.published_by(self.id, round_number))
            self._require_own(said, self.model.eval(), self.model.state_dict(), self._transfer)
            self._said, self._images = said.get(PREDICTIONS, torch.empty(0)), said.get(IMAGES, torch.empty(0))
            kind = self.federation.published_by(self.id, round_number)
            self._bundle = parts_of(said) if kind == BUNDLE else {}
        try:
            self._method.restore(state)
        except ValueError as error:
            raise SnapshotError(f"checkpoint of round {round_number} is not of this method: {error}") from None
        self._optimizer.buffers = {
            name.removeprefix(_MOMENTUM): buffer.to(self.device) for name, buffer in momentum.items()
        }
        if counts is not None:
            self._noised_counts = tuple(counts)
        self.round = round_number

    @property
    def next_round(self) -> int:
        """The round that is open or, if none is, the one after the last."""
        return self.round + 1 if self._epoch is None else self._open

    def open_round(self, number: int | None = None) -> None:
        """Draw order and augmentation of a round's local epoch, and make room for its teachers. If the own model is one
        of them, it teaches now, while the others are yet to come.

        Args:
            number: of the round, by default the one after the last; later, where this client had no part in some.
        """
        number = self._open = self.round + 1 if number is None else number
        self._epoch = draw_epoch(
            self._train.images,
            self._train.labels,
            batch_size=self.federation.training.batch_size,
            augmentation=self._augmentation,
            mean=self._mean,
            std=self._std,
            generator=generator(self.federation.seed, "local epoch", peer=self.id, round_number=number),
            device=self.device,
        )
        self._posteriors = PosteriorStore(self._folder / "posteriors", self._epoch, self.classes)
        self._teachers, self._heard, self._came = {}, {}, {}
        if self.federation.method.traits.has_memory and self.federation.teachers_of(self.id, number):
            self._run(self.id, self._bound(self.arch, self.model.state_dict(), self._precision))

    def teach(self, manifest: Manifest, snapshot: bytes) -> None:
        """Run one peer's snapshot over the open round's epoch; only its posteriors are kept. If it is no model, it is
        kept as it is.

        Raises:
            SnapshotError: the snapshot must not be used; the round goes on without it.
        """
        self._opened()
        if self._keeps_model:
            if self.federation.method.aggregates:
                self._came[manifest.peer] = self._models_in(snapshot, manifest)
            else:
                self._heard[manifest.peer] = self._heard_in(snapshot, manifest)
            self._teachers[manifest.peer] = manifest
            return
        teacher = self._frozen(manifest.arch, snapshot, self._precision)
        weights.probe(teacher, self._image_shape, self.device)
        self._run(manifest.peer, teacher)
        self._teachers[manifest.peer] = manifest

    def train(self, teachers: Sequence[int], last_good: LastGood) -> EpochLog:
        """Distil from these peers, in id order whatever the order in which they taught, and end the round.

        Without any, it learns from the own labels alone. Training that diverges is redone from the last good round at a
        lower learning rate, with the same epoch and posteriors: a function of what was there before the round, so that
        it gives the same bytes wherever and however often it happens.

        Args:
            last_good: called after training that diverged only, so that no second model is held meanwhile.

        Raises:
            DivergedError: at every learning rate; the model is that of the last good round again.
            SnapshotError: the last good round's files cannot be used.
            LearnerFailedError: another one has trained the model of this client, and it cannot be used.
        """
        epoch, posteriors = self._opened()
        if self.federation.method.aggregates:
            return self._take_up(teachers)
        lesson = self._lesson(sorted(teachers), posteriors)
        objective, digest = self._method.objective(lesson), self._method.digest(lesson)
        if digest is not None and digest.is_beside:
            objective, digest = self._beside(digest, objective, len(epoch.batches)), None
        images = self._new_transfer_set(teachers)
        for attempt in range(MAX_REDONE + 1):
            # Set for every attempt, so that a lower one does not outlive its round. The momentum is of gradients, not
            # of steps, so it is slowed down with them.
            self._optimizer.learning_rate = self._learning_rate(attempt)
            if digest is not None:
                self._digest(digest)
            log = self._pass_over(epoch, objective)
            self._transfer = images
            self._speak(self._open)
            log.redone = attempt
            reason = self._divergence(log)
            if reason is None:
                self._paint(self._open)
                self._end_round()
                return log
            self._say_redone(attempt, reason)
            self.restore(self.round, *last_good())
        raise self._diverged(reason)

    def validate(self) -> ClassStatistics:
        """Class statistics of the model as it is now, on the validation half of the held-out samples, as published:
        where the federation has noise on the counts, the true ones never leave this method.
        """
        self._progress("validate", 0, 1)
        self.model.eval()
        with_cross_entropy = self.federation.method.traits.publishes_cross_entropy
        measured = measure(self.model, self._validation, self.classes, with_cross_entropy=with_cross_entropy)
        epsilon = self.federation.privacy.count_epsilon
        if epsilon is None:
            return measured
        if self._noised_counts is None:
            if self._count_key is None:
                raise RuntimeError("the federation has noise on the counts, and this client has no secret for it")
            self._noised_counts = privacy.noised_counts(
                measured.counts, self._count_key, epsilon, self.federation.digest(), self.id
            )
        return privacy.publishable(measured, self._noised_counts)

    def snapshot(self) -> bytes:
        """What is published of this round: the model's tensors, or what a method has in their place."""
        kind = self.federation.published_by(self.id, self.round)
        if kind == self.arch:
            return weights.encode(self.model.state_dict())
        said: dict[str, Callable[[], Tensor]] = {
            PREDICTIONS: lambda: self._said,
            IMAGES: lambda: self._images,
            MODEL_DIGEST: lambda: transfer.digest_of_model(self.model.state_dict()),
            transfer.TRANSFER_DIGEST: lambda: transfer.digest_of_images(self._known_transfer()),
        }
        bundle = bundle_of(self._bundle) if kind == BUNDLE else {}
        return weights.encode({name: bundle[name] if name in bundle else said[name]() for name in self._layouts[kind]})

    def checkpoint(self) -> bytes:
        """What :meth:`restore` needs besides the snapshot: the optimiser's momentum, what the method keeps, and the
        model if it is not published. Random draws need no state.
        """
        momentum = {_MOMENTUM + name: buffer for name, buffer in self._optimizer.buffers.items()}
        return weights.encode(momentum | self._state())

    def kept_beside(self) -> bytes | None:
        """What :meth:`evaluate` needs besides the snapshot of now: the checkpoint but for the momentum; None if it
        needs nothing.
        """
        return weights.encode(self._state()) if self.federation.method.needs_checkpoint else None

    def evaluate(self, snapshot: bytes, beside: bytes | None = None) -> Evaluation:
        """Accuracy of one of this client's snapshots on the global test set and on its own test samples.

        Args:
            beside: the checkpoint of the same round, or what :meth:`kept_beside` gave; for methods that need it.

        Raises:
            SnapshotError: the files do not fit this client's architecture, or one another.
        """
        self._progress("evaluate", 0, 1)
        kept = weights.decode(beside) if beside else {}
        model = self._bound(self.arch, self._model_in(snapshot, kept), torch.float32)
        if self._keeps_model:
            said = self._spoken(snapshot, *self.federation.kinds_of(self.id))
            self._require_own(said, model, _with_prefix(kept, _MODEL), self._transfer_in(kept))
        everywhere, here = self._measured(model)
        per_class = [h / n if n else None for h, n in zip(everywhere.hits, everywhere.counts, strict=True)]
        if not self.federation.data.has_common_test:
            per_class = []
        found = Evaluation(everywhere.accuracy, tuple(per_class), here.accuracy)
        if not self.federation.method.traits.has_peak:
            return found
        if peak := _with_prefix(kept, _METHOD):
            everywhere, here = self._measured(self._bound(self.arch, peak, torch.float32))
        return replace(found, peak_global_accuracy=everywhere.accuracy, peak_local_accuracy=here.accuracy)

    def close(self) -> None:
        """Remove the scratch folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _run(self, peer: int, teacher: Forward) -> None:
        _, posteriors = self._opened()
        posteriors.run(
            peer,
            teacher,
            self._method.temperature,
            progress=lambda done, steps: self._progress("teachers", done, steps),
        )

    def _end_round(self) -> None:
        _, posteriors = self._opened()
        posteriors.close()
        self._heard, self._came = {}, {}
        self._epoch = self._posteriors = None
        self.round = self._open
        self._method.after_round(self.round, self.model)

    def _lesson(self, teachers: list[int], posteriors: PosteriorStore) -> Lesson:
        making = self.federation.method.making
        return Lesson(
            self._open,
            tuple(self._teachers[peer] for peer in teachers),
            lambda batch: posteriors.batch(teachers, batch),
            lambda batch: posteriors.batch([self.id], batch)[0],
            self._predictions_of(teachers),
            None if making is None or self._transfer is None else transfer.places_there(self._transfer),
        )

    def _state(self) -> dict[str, Tensor]:
        state = {_METHOD + name: value for name, value in self._method.state().items()}
        if self._keeps_model:
            state |= {_MODEL + name: value for name, value in self.model.state_dict().items()}
        if self._transfer is not None and self.federation.method.making is not None:  # nobody can compute it
            state[_TRANSFER] = torch.from_numpy(self._transfer)
        return state

    def _model_in(self, snapshot: bytes, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model of a round of this client, from its snapshot or, where that has none, from its checkpoint."""
        tensors = _with_prefix(kept, _MODEL) if self._keeps_model else weights.decode(snapshot)
        if not tensors and self._keeps_model:
            raise SnapshotError(
                f"its checkpoint holds no model, which method {self.federation.method.name} keeps there and does not "
                f"publish, so that nobody else has it"
            )
        weights.check_values(tensors)
        return tensors

    # --- the transfer set ---

    def _known_transfer(self) -> NDArray[np.uint8]:
        if self._transfer is None:
            raise SnapshotError("there is no transfer set here")
        return self._transfer

    def _transfer_in(self, kept: Mapping[str, Tensor]) -> NDArray[np.uint8] | None:
        """The transfer set as it was known in the round of a checkpoint of this client."""
        if self.federation.method.making is None:
            return self._transfer
        return kept[_TRANSFER].numpy() if _TRANSFER in kept else None

    @torch.no_grad()
    def _predict(self, model: Forward, images: NDArray[np.uint8]) -> Tensor:
        """Logits of a model in eval mode on a transfer set: float32 [S, C] on the CPU."""
        samples = self._plain(ImageSet(images, np.zeros(len(images), dtype=np.int64)))
        return torch.cat([model(samples.pixels(batch)).float().cpu() for batch in samples.batches])

    def _speak(self, number: int) -> None:
        """Note what the model as it is now says of the transfer set, if that is what a round publishes."""
        if self.federation.published_by(self.id, number) == PREDICTIONS:
            self._said = self._predict(self.model.eval(), self._known_transfer())

    def _paint(self, number: int) -> None:
        """Make this peer's part of a new transfer set, if that is what a round publishes."""
        making, federation = self.federation.method.making, self.federation
        if making is None or not making.are_made_in(number):
            return
        model = build_model(self.arch, classes=self.classes, channels=self._image_shape[0], device=self.device)
        model.load_state_dict(self.model.state_dict())
        validated, trained = (
            np.bincount(labels, minlength=self.classes).tolist()
            for labels in (self._validation.labels.cpu().numpy(), self._train.labels)
        )
        self._images = make_images(
            model.eval().requires_grad_(False),
            federation.images_of(self.id),
            classes_held(validated, trained, federation.method.min_support),
            image_shape=self._image_shape,
            mean=self._mean,
            std=self._std,
            steps=making.steps,
            batch_size=federation.training.batch_size,
            seed=federation.seed,
            peer=self.id,
            round_number=number,
            device=self.device,
            progress=lambda done, steps: self._progress("train", done, steps),
        )

    def _new_transfer_set(self, teachers: Sequence[int]) -> NDArray[np.uint8] | None:
        """What the open round ends with: the parts of all who have published theirs in the one before, or what there
        was.
        """
        making, federation = self.federation.method.making, self.federation
        if making is None or not making.are_made_in(self._open - 1):
            return self._transfer
        parts = {peer: self._heard[peer] for peer in teachers} | {self.id: self._images}
        return transfer.union(
            [(parts.get(peer), federation.images_of(peer)) for peer in federation.ids], self._image_shape
        )

    def _spoken(self, snapshot: bytes, *keys: str) -> dict[str, Tensor]:
        """The tensors of a snapshot of one of these kinds."""
        return transfer.tensors_in(snapshot, *(self._layouts[key] for key in keys))

    def _heard_in(self, snapshot: bytes, manifest: Manifest) -> Tensor:
        """Of another peer's snapshot, not of models: predictions, float32 [S, C], or images, uint8 [n, C, H, W]."""
        tensors = self._spoken(snapshot, self.federation.published_by(manifest.peer, manifest.round))
        if transfer.TRANSFER_DIGEST in tensors:
            own = transfer.digest_of_images(self._known_transfer())
            transfer.require_equal(own, tensors[transfer.TRANSFER_DIGEST], "the transfer set here")
        heard = tensors.get(PREDICTIONS, tensors.get(IMAGES))
        if heard is None:
            raise SnapshotError(f"it holds '{MODEL_DIGEST}' alone, from which nobody can learn")
        return heard

    def _require_own(
        self, said: Mapping[str, Tensor], model: Forward, state: Mapping[str, Tensor], images: NDArray[np.uint8] | None
    ) -> None:
        """See that a model in eval mode, and a transfer set, are those of a snapshot of this client.

        Args:
            said: the tensors of the snapshot.
            state: those of the model.

        Raises:
            SnapshotError: they are others.
        """
        if MODEL_DIGEST in said:
            found = transfer.digest_of_model(state)
            transfer.require_equal(found, said[MODEL_DIGEST], "the model in its checkpoint")
        elif PREDICTIONS not in said:  # an initial model, which is published
            found = transfer.digest_of_model(state)
            transfer.require_equal(found, transfer.digest_of_model(said), "the model in its checkpoint")
        if PREDICTIONS not in said:
            return
        if images is None:
            raise SnapshotError("its checkpoint holds no transfer set, and predictions of one were published")
        if transfer.TRANSFER_DIGEST in said:
            found = transfer.digest_of_images(images)
            transfer.require_equal(found, said[transfer.TRANSFER_DIGEST], "the transfer set in its checkpoint")
        transfer.require_same(self._predict(model, images), said[PREDICTIONS])

    def _predictions_of(self, teachers: list[int]) -> Tensor | None:
        """Theirs and the own ones of the last round, in id order: float32 [N, S, C]; None if that had none."""
        is_spoken = self.federation.published_by(self.id, self._open - 1) == PREDICTIONS
        if not teachers or not is_spoken:
            return None
        return torch.stack(
            [self._said if peer == self.id else self._heard[peer] for peer in sorted([self.id, *teachers])]
        )

    def _digest(self, digest: Digest) -> None:
        """One epoch over the images of the transfer set that the method has chosen, as they are."""
        places = digest.places.numpy()
        epoch = draw_epoch(
            self._known_transfer()[places],
            np.arange(len(places)),  # in the labels' place, so that a batch finds its targets
            batch_size=self.federation.training.batch_size,
            augmentation="none",
            mean=self._mean,
            std=self._std,
            generator=generator(self.federation.seed, "transfer epoch", peer=self.id, round_number=self._open),
            device=self.device,
        )
        targets = digest.targets.to(self.device)
        self._pass_over(epoch, lambda _, logits, rows: Step(digest.loss(logits, targets[rows]), None))

    def _beside(self, digest: Digest, objective: Objective, steps: int) -> Objective:
        """An objective, and a batch of the transfer set learned in each of the steps of the open round's epoch."""
        places, batch_size = digest.places.numpy(), self.federation.training.batch_size
        size = min(batch_size, len(places))
        if size < 2:  # batch norm learns nothing from a single image
            return objective
        draw = generator(self.federation.seed, "transfer batches", peer=self.id, round_number=self._open)
        passes = -(-steps * size // len(places))
        order = np.concatenate([draw.permutation(len(places)) for _ in range(passes)])[: steps * size]
        images = plain_batches(
            self._known_transfer()[places[order]],
            order,  # in the labels' place, so that a batch finds its targets
            batch_size=size,
            mean=self._mean,
            std=self._std,
            device=self.device,
        )
        targets = digest.targets.to(self.device)

        def both(batch: slice, logits: Tensor, labels: Tensor) -> Step:
            step, beside = objective(batch, logits, labels), images.batches[batch.start // batch_size]
            loss = digest.loss(self.model(images.pixels(beside)), targets[images.labels[beside]])
            return Step(step.loss + loss, step.target)

        return both

    # --- one that trains for all ---

    def _models_in(self, snapshot: bytes, manifest: Manifest) -> dict[int, dict[str, Tensor]]:
        """The models in another peer's snapshot, by their peers: all where this one trains them, else the own.

        Raises:
            SnapshotError: one of them must not be used, whosever it is; so all say the same.
        """
        kind = self.federation.published_by(manifest.peer, manifest.round)
        tensors = self._spoken(snapshot, kind)
        models = parts_of(tensors) if kind == BUNDLE else {manifest.peer: tensors}
        if kind == MODEL_DIGEST:
            raise SnapshotError(f"it holds '{MODEL_DIGEST}' alone, from which nobody can learn")
        self._probe_all(models)
        if self.federation.aggregator(self._open) == self.id:
            return models
        return {peer: model for peer, model in models.items() if peer == self.id}

    def _probe_all(self, models: Mapping[int, Mapping[str, Tensor]]) -> None:
        for peer, model in models.items():
            skeleton = build_model(
                self.federation.peer(peer).arch, classes=self.classes, channels=self._image_shape[0], device="meta"
            )
            on_device = {name: value.to(self.device) for name, value in model.items()}
            try:
                weights.check_values(on_device)
                # As it is, and not frozen: it is to be trained and validated.
                weights.probe(weights.as_function(skeleton, on_device), self._image_shape, self.device)
            except SnapshotError as error:
                raise SnapshotError(f"the model of peer {peer}: {error}") from None

    def _take_up(self, teachers: Sequence[int]) -> EpochLog:
        """The open round of a method in which one peer trains the models of all."""
        epoch, _ = self._opened()
        models = self._models_trained_last(teachers)
        self.model.load_state_dict(models[self.id])
        log, self._bundle = EpochLog(), {}
        if self.federation.aggregator(self._open) == self.id:
            log, self._bundle = self._train_all(models, epoch)
        self._end_round()
        return log

    def _models_trained_last(self, teachers: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """The models with which the open round begins: of all peers where this one trains them, else the own."""
        federation, number = self.federation, self._open
        sender = federation.aggregator(number - 1)
        if sender == self.id:
            return self._bundle
        models = {self.id: self.model.state_dict()} if sender is None else {}
        for peer in sorted(teachers):
            models |= self._came[peer]
        needed = set(federation.ids) if federation.aggregator(number) == self.id else {self.id}
        if missing := sorted(needed - models.keys()):
            whose = ", ".join(map(str, missing if sender is None else [sender]))
            raise LearnerFailedError(
                f"peer {self.id} cannot go on after round {number - 1}: what came from peer {whose} is not used (the "
                f"log says why), and by method {federation.method.name} with mode aggregator nobody else has the "
                f"models that should have been in it. Start a new run without peer {whose}, or once it is mended"
            )
        return models

    def _train_all(
        self, models: Mapping[int, Mapping[str, Tensor]], epoch: LocalEpoch
    ) -> tuple[EpochLog, dict[int, dict[str, Tensor]]]:
        """One epoch of the models of all peers on the images of this one; on the CPU again."""
        archs = {peer: self.federation.peer(peer).arch for peer in self.federation.ids}
        objective = self._method.together(self._open, archs)
        assert objective is not None
        reason = None
        for attempt in range(MAX_REDONE + 1):
            modules = {}
            for peer, arch in archs.items():
                modules[peer] = build_model(
                    arch, classes=self.classes, channels=self._image_shape[0], device=self.device
                )
                modules[peer].load_state_dict(models[peer])
            log = train_together(
                modules,
                epoch,
                objective,
                self.federation.training,
                self._learning_rate(attempt),
                lambda done, steps: self._progress("train", done, steps),
            )
            log.redone = attempt
            trained = {
                peer: {name: value.cpu() for name, value in module.state_dict().items()}
                for peer, module in modules.items()
            }
            reason = _loss_divergence(log)
            try:
                self._probe_all(trained)  # as all others will
            except SnapshotError as error:
                reason = reason or str(error)
            if reason is None:
                return log, trained
            self._say_redone(attempt, reason)
        raise self._diverged(reason)

    def _measured(self, model: Forward) -> tuple[ClassStatistics, ClassStatistics]:
        """On the global test set, and on the own test samples."""
        return measure(model, self._global_test, self.classes), measure(model, self._test, self.classes)

    def _pass_over(self, epoch: LocalEpoch, objective: Objective) -> EpochLog:
        return train_epoch(
            self.model,
            self._optimizer,
            epoch,
            objective,
            self.federation.training,
            lambda done, steps: self._progress("train", done, steps),
        )

    def _learning_rate(self, attempt: int) -> float:
        return self.federation.training.learning_rate / _SLOW_DOWN**attempt

    def _divergence(self, log: EpochLog) -> str | None:
        """Why the model must not be published, if so."""
        if (reason := _loss_divergence(log)) is not None:
            return reason
        try:
            weights.check_values(self.model.state_dict())
            if self._keeps_model:  # nobody would take them
                weights.check_values({PREDICTIONS: self._said})
        except SnapshotError as error:
            return str(error)
        return None

    def _say_redone(self, attempt: int, reason: str) -> None:
        if attempt < MAX_REDONE:
            self._warn(
                f"round {self._open}: training diverged ({reason}); redone from round {self.round} at "
                f"learning rate {self._learning_rate(attempt + 1):g}, attempt {attempt + 1} of {MAX_REDONE}"
            )

    def _diverged(self, reason: str | None) -> DivergedError:
        rates = ", ".join(f"{self._learning_rate(attempt):g}" for attempt in range(MAX_REDONE + 1))
        return DivergedError(
            f"peer {self.id}: training of round {self._open} diverged at each of the learning rates {rates} (the "
            f"last time: {reason}); nothing after round {self.round} was published. Starting again would end the "
            f"same way: start a new run with a training.learning_rate below "
            f"{self.federation.training.learning_rate:g} in the federation file of every peer"
        )

    def _frozen(self, arch: str, snapshot: bytes, precision: torch.dtype) -> Forward:
        tensors = weights.decode(snapshot)
        weights.check_values(tensors)
        return self._bound(arch, tensors, precision)

    def _bound(self, arch: str, tensors: Mapping[str, Tensor], precision: torch.dtype) -> Forward:
        on_device = {name: value.to(self.device) for name, value in tensors.items()}
        return self._architectures[arch].bind(on_device, precision, inference_batch(self._train.images, self.device))

    def _opened(self) -> tuple[LocalEpoch, PosteriorStore]:
        if self._epoch is None or self._posteriors is None:
            raise RuntimeError("no round is open: call open_round first")
        return self._epoch, self._posteriors

    def _plain(self, samples: ImageSet) -> LocalEpoch:
        return plain_batches(
            samples.images,
            samples.labels,
            batch_size=inference_batch(samples.images, self.device),
            mean=self._mean,
            std=self._std,
            device=self.device,
        )


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _loss_divergence(log: EpochLog) -> str | None:
    return None if log.loss is None or math.isfinite(log.loss) else f"the loss is {log.loss}"


def _subset(samples: ImageSet, indices: NDArray[np.int64]) -> ImageSet:
    return ImageSet(samples.images[indices], samples.labels[indices])
