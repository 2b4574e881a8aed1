"""How well a model knows each class, and the weight that this evidence deserves (Eqs. 6-7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from crad_p2p.data.epoch import LocalEpoch
from crad_p2p.frozen import Forward
from crad_p2p.manifest import CROSS_ENTROPY_LIMIT, ClassStatistics

#: Keeps 1/variance finite; Agresti-Coull keeps the variance above zero by itself, so it never matters in practice.
EPSILON = 1e-12


def agresti_coull(counts: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate of a class accuracy and its variance sigma^2 (Eq. 6), which is never zero: float64.

    Args:
        counts: n, floating, any shape.
        hits: h <= n, the same shape.
    """
    n, h = counts.double(), hits.double()
    accuracy = (h + 2) / (n + 4)
    return accuracy, accuracy * (1 - accuracy) / (n + 4)


def precision(counts: Tensor, hits: Tensor) -> Tensor:
    """Weight 1/sigma^2 of a class accuracy (Eq. 7), from its Agresti-Coull estimate (Eq. 6).

    It rewards decisiveness, not correctness: 0 of n and n of n weigh the same.

    Args:
        counts: n, floating, any shape.
        hits: h <= n, the same shape.

    Returns:
        float64 of that shape.
    """
    return 1 / (agresti_coull(counts, hits)[1] + EPSILON)


@torch.no_grad()
def measure(model: Forward, samples: LocalEpoch, classes: int, *, with_cross_entropy: bool = False) -> ClassStatistics:
    """Count n, h and p of every class, for a model in eval mode on un-augmented samples.

    Args:
        with_cross_entropy: also the mean of -log p(c|x) over the samples x of each class c.
    """
    counts = torch.zeros(classes, dtype=torch.int64)
    hits, predicted = counts.clone(), counts.clone()
    surprise = torch.zeros(classes, dtype=torch.float64)
    for batch in samples.batches:
        logits = model(samples.pixels(batch))
        guess = logits.argmax(-1).cpu()
        labels = samples.labels[batch].cpu()
        counts += torch.bincount(labels, minlength=classes)
        hits += torch.bincount(labels[guess == labels], minlength=classes)
        predicted += torch.bincount(guess, minlength=classes)
        if with_cross_entropy:
            each = F.cross_entropy(logits.cpu().double(), labels, reduction="none")
            surprise += torch.bincount(labels, weights=each, minlength=classes)
    return ClassStatistics(
        counts=tuple(counts.tolist()),
        hits=tuple(hits.tolist()),
        predicted=tuple(predicted.tolist()),
        cross_entropy=_published(surprise / counts) if with_cross_entropy else None,
    )


def _published(cross_entropy: Tensor) -> tuple[float, ...]:
    """Within what a manifest may say; not a number, as without any sample, is the most."""
    limited = cross_entropy.nan_to_num(nan=CROSS_ENTROPY_LIMIT).clamp(0, CROSS_ENTROPY_LIMIT)
    return tuple(limited.tolist())
