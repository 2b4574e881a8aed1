"""Losses that methods share, Eq. 9 first, and the local epoch that minimises one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crad_p2p.aggregation import Aggregation
from crad_p2p.data.epoch import LocalEpoch
from crad_p2p.federation import TrainingSettings
from crad_p2p.sgd import Sgd
from crad_p2p.teachers import Progress


class Step(NamedTuple):
    """What one batch is trained by.

    Attributes:
        loss: a scalar.
        target: what the loss pulls towards, for the log; None if that is the own labels alone.
    """

    loss: Tensor
    target: Aggregation | None


#: The step of a batch, from its place in the epoch, the student's logits [B, C] and the labels [B].
Objective = Callable[[slice, Tensor, Tensor], Step]


def own_labels(_batch: slice, logits: Tensor, labels: Tensor) -> Step:
    """The objective without teachers: cross-entropy at weight 1."""
    return Step(F.cross_entropy(logits, labels), None)


def distillation_loss(logits: Tensor, labels: Tensor, target: Tensor, *, temperature: float, weight: float) -> Tensor:
    """Eq. 9: (1 - weight) CE + weight T^2 KL(target || student), a scalar.

    Args:
        logits: float [B, C] of the student.
        labels: int64 [B].
        target: float [B, C], rows sum to 1; zeros are allowed.
        temperature: T, of the student's softmax here and of the teachers' before.
        weight: lambda, 0 to 1.
    """
    return (1 - weight) * F.cross_entropy(logits, labels) + weight * soft_loss(logits, target, temperature)


def soft_loss(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """T^2 KL(target || softmax(logits / T)), a scalar, the mean over samples; arguments as above."""
    # "batchmean" is the mean over samples; the default reduction would divide by C as well.
    return temperature**2 * F.kl_div(F.log_softmax(logits / temperature, dim=-1), target, reduction="batchmean")


def divergence(logits: Tensor, q: Tensor, weights: Tensor) -> Tensor:
    """The sum over k of weights[k] KL(q[k] || student), a scalar, the mean over samples; no gradient reaches q.

    It is the divergence from the weighted mean of q, and what no student can change: the entropy of that mean less the
    mean of their entropies. So the sum over k is done in float64, once, and not on the device.

    Args:
        logits: float [B, C] of the student, divided by the temperature of q.
        q: float64 [K, B, C] on the CPU, rows sum to 1; zeros are allowed.
        weights: float64 [K] on the CPU, they sum to 1.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        mean = (weights[:, None, None] * q).sum(0)
        entropies = torch.special.entr(q).sum(-1).mean(-1)
        spread = float(torch.special.entr(mean).sum(-1).mean() - (weights * entropies).sum())
    towards = F.kl_div(F.log_softmax(logits, dim=-1), mean.to(logits.dtype).to(logits.device), reduction="batchmean")
    return towards + spread


@dataclass
class EpochLog:
    """Means over the samples of one local epoch; the target's fields stay at None without teachers.

    ``target_mass`` is the mean mass before renormalising and ``target_collapsed`` the share of samples with less than
    half of it left: the median filter is a majority vote per class and can collapse while most teachers are weak.
    ``target_top1`` is how often the target's largest class is the label. ``redone`` counts the attempts before this
    one whose training diverged.
    """

    samples: int = 0
    loss: float | None = None
    target_mass: float | None = None
    target_collapsed: float | None = None
    target_top1: float | None = None
    redone: int = 0


def train_epoch(
    model: nn.Module,
    optimizer: Sgd,
    epoch: LocalEpoch,
    objective: Objective,
    training: TrainingSettings,
    progress: Progress = lambda *_: None,
) -> EpochLog:
    """One pass over the local epoch, one optimiser step a batch."""
    model.train()
    samples = 0
    sums = torch.zeros(3, dtype=torch.float64)  # mass, collapsed, top-1
    losses: list[tuple[Tensor, int]] = []  # read at the end: reading one waits for the device
    labels_on_cpu = epoch.labels.cpu()
    with_targets = False
    for index, batch in enumerate(epoch.batches):
        labels = epoch.labels[batch]
        logits = model(epoch.pixels(batch))
        loss, aggregation = objective(batch, logits, labels)
        if aggregation is not None:
            with_targets = True
            hit = aggregation.target.argmax(-1) == labels_on_cpu[batch]
            sums += torch.stack([aggregation.mass, aggregation.mass < 0.5, hit]).double().sum(-1)
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        samples += len(labels)
        losses.append((loss.detach(), len(labels)))
        progress(index + 1, len(epoch.batches))
    if not samples:
        return EpochLog()
    loss_mean = sum(float(loss) * count for loss, count in losses) / samples
    mass, collapsed, top1 = (sums / samples).tolist()
    if not with_targets:
        return EpochLog(samples, loss_mean)
    return EpochLog(samples, loss_mean, mass, collapsed, top1)
