"""CRAD, and other weights for the teachers that its filter keeps: Stage 1 alone, and the rows of the paper's Table 4.

All share Eqs. 4-5 (which teachers count for a class of a sample), Eq. 8 (their weighted mean) and Eq. 9. With
a~ = (h + 2) / (n + 4) and sigma^2 = a~ (1 - a~) / (n + 4) (Eq. 6), the weight of teacher j for class c is

=============  ==============================  ======================================================================
method         weight                          whose it is
=============  ==============================  ======================================================================
``crad``       1 / (sigma^2 + epsilon)         the paper's, Eq. 7; epsilon = 1e-12 is ours
``precision``  the same                        the row's name in Table 4; all models equal those of ``crad``
``stage1``     1                               the paper's ablation: the filter alone
``acc``        h / n                           the paper has the row's name; that it is the raw ratio is ours
``sup``        n                               likewise
``sm``         exp(-sigma^2)                   ours: the softmax of -sigma^2 over those who are kept; Eq. 8 divides
                                               by the sum
``lcb``        max(0, a~ - sigma)              ours: a lower confidence bound at one standard error
``ce``         1 / (CE + 1e-3)                 ours (``ce_val``): CE is the mean of -log p(c|x) over the teacher's own
                                               validation images x of class c, which it publishes with n and h
``inv_sigma``  1 / sqrt(sigma^2 + epsilon)     the paper has the row's name; the same epsilon is ours
=============  ==============================  ======================================================================

The paper gives no formula for ``acc`` to ``inv_sigma`` that could be read; what it says of them is that precision does
best, and 1/sigma worst on the own test images.

Three things to know. ``sm`` is ``stage1`` in all but name: sigma^2 is at most 0.25 / (n + 4), so for n >= 2 no weight
is more than e^0.0417 = 1.043 times another. ``lcb`` never clips: a~ / sigma = sqrt(a~ (n + 4) / (1 - a~)) is at least
sqrt(2). And where all weights of those who are kept are zero (``acc``, if all of them were always wrong), all count
alike (ours), in :func:`crad_p2p.aggregation.weighted_mean`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from crad_p2p.statistics import EPSILON, agresti_coull, precision

#: Keeps the weight of a teacher that is never in doubt finite; a thousandth of a nat is already as good as certain.
CROSS_ENTROPY_EPSILON = 1e-3


class Evidence(NamedTuple):
    """What teachers say of themselves, each float64 [J, C]; the cross-entropy is there for ``ce`` alone."""

    counts: Tensor
    hits: Tensor
    cross_entropy: Tensor | None = None


def _precision(evidence: Evidence) -> Tensor:
    return precision(evidence.counts, evidence.hits)


def _equal(evidence: Evidence) -> Tensor:
    return torch.ones_like(evidence.counts)


def _accuracy(evidence: Evidence) -> Tensor:
    return evidence.hits / evidence.counts.clamp_min(1)


def _support(evidence: Evidence) -> Tensor:
    return evidence.counts


def _softmin(evidence: Evidence) -> Tensor:
    return torch.exp(-agresti_coull(evidence.counts, evidence.hits)[1])


def _lower_bound(evidence: Evidence) -> Tensor:
    accuracy, variance = agresti_coull(evidence.counts, evidence.hits)
    return (accuracy - variance.sqrt()).clamp_min(0)


def _certainty(evidence: Evidence) -> Tensor:
    assert evidence.cross_entropy is not None
    return 1 / (evidence.cross_entropy + CROSS_ENTROPY_EPSILON)


def _inverse_sigma(evidence: Evidence) -> Tensor:
    return 1 / (agresti_coull(evidence.counts, evidence.hits)[1] + EPSILON).sqrt()


#: Rule to weights, float64 [J, C], never negative.
WEIGHTS: Mapping[str, Callable[[Evidence], Tensor]] = {
    "crad": _precision,
    "stage1": _equal,
    "acc": _accuracy,
    "sup": _support,
    "sm": _softmin,
    "lcb": _lower_bound,
    "ce": _certainty,
    "inv_sigma": _inverse_sigma,
    "precision": _precision,
}
