"""How well a model knows each class, and the weight that this evidence deserves (Eqs. 6-7)."""

from __future__ import annotations

import torch
from torch import Tensor

from crad_p2p.data.epoch import LocalEpoch
from crad_p2p.frozen import Forward
from crad_p2p.manifest import ClassStatistics

#: Keeps 1/variance finite; Agresti-Coull keeps the variance above zero by itself, so it never matters in practice.
EPSILON = 1e-12


def precision(counts: Tensor, hits: Tensor) -> Tensor:
    """Weight 1/sigma^2 of a class accuracy (Eq. 7), from its Agresti-Coull estimate (Eq. 6).

    It rewards decisiveness, not correctness: 0 of n and n of n weigh the same.

    Args:
        counts: n, floating, any shape.
        hits: h <= n, the same shape.

    Returns:
        float64 of that shape.
    """
    n, h = counts.double(), hits.double()
    accuracy = (h + 2) / (n + 4)
    variance = accuracy * (1 - accuracy) / (n + 4)
    return 1 / (variance + EPSILON)


@torch.no_grad()
def measure(model: Forward, samples: LocalEpoch, classes: int) -> ClassStatistics:
    """Count n, h and p of every class, for a model in eval mode on un-augmented samples."""
    counts = torch.zeros(classes, dtype=torch.int64)
    hits, predicted = counts.clone(), counts.clone()
    for batch in samples.batches:
        guess = model(samples.pixels(batch)).argmax(-1).cpu()
        labels = samples.labels[batch].cpu()
        counts += torch.bincount(labels, minlength=classes)
        hits += torch.bincount(labels[guess == labels], minlength=classes)
        predicted += torch.bincount(guess, minlength=classes)
    return ClassStatistics(
        counts=tuple(counts.tolist()), hits=tuple(hits.tolist()), predicted=tuple(predicted.tolist())
    )
