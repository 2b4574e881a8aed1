"""Training the models of all peers at once on one peer's images, and the file with which they are passed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from crad_p2p.data.epoch import LocalEpoch
from crad_p2p.distillation import EpochLog
from crad_p2p.federation import TrainingSettings
from crad_p2p.sgd import Sgd
from crad_p2p.teachers import Progress

#: The loss of every model, a scalar, by peer, from the logits [B, C] of each and the labels [B]. No gradient of one
#: model's loss reaches another.
Together = Callable[[Mapping[int, Tensor], Tensor], Mapping[int, Tensor]]

T = TypeVar("T")


def train_together(
    models: Mapping[int, nn.Module],
    epoch: LocalEpoch,
    objective: Together,
    training: TrainingSettings,
    learning_rate: float,
    progress: Progress = lambda *_: None,
) -> EpochLog:
    """One pass over the local epoch: for each batch the logits of all models, then one step of each, in id order.

    Every optimiser begins without momentum. The log's loss is the mean over samples and models.
    """
    optimizers = {
        peer: Sgd(
            dict(model.train().named_parameters()),
            learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )
        for peer, model in sorted(models.items())
    }
    losses: list[tuple[Tensor, int]] = []  # read at the end: reading one waits for the device
    for index, batch in enumerate(epoch.batches):
        pixels, labels = epoch.pixels(batch), epoch.labels[batch]
        each = objective({peer: models[peer](pixels) for peer in optimizers}, labels)
        for peer, optimizer in optimizers.items():
            models[peer].zero_grad(set_to_none=True)
            each[peer].backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(models[peer].parameters(), training.clip_norm)
            optimizer.step()
            losses.append((each[peer].detach(), len(labels)))
        progress(index + 1, len(epoch.batches))
    samples = sum(count for _, count in losses) // max(1, len(models))
    if not samples:
        return EpochLog()
    return EpochLog(samples, sum(float(loss) * count for loss, count in losses) / (samples * len(models)))


def bundle_of(parts: Mapping[int, Mapping[str, T]]) -> dict[str, T]:
    """Tensors, or what describes them, of all peers, each name with ``ID.`` before it."""
    return {f"{peer}.{name}": value for peer, part in sorted(parts.items()) for name, value in part.items()}


def parts_of(bundle: Mapping[str, T]) -> dict[int, dict[str, T]]:
    """What :func:`bundle_of` has put together; names without a peer are left out."""
    parts: dict[int, dict[str, T]] = {}
    for name, value in bundle.items():
        peer, dot, rest = name.partition(".")
        if dot:
            parts.setdefault(int(peer), {})[rest] = value
    return parts
