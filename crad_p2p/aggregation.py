"""Many teachers' posteriors become one soft target: CRAD and the rules it is compared with.

Everything is computed in float64 and outside autocast, since the filter compares numbers that tie exactly: of two
supported teachers both deviate equally from their mean, and float32 rounding would drop one of them in half of the
cases.

Equation numbers are those of arXiv 2609.00446: Eq. 3 the uniform mean, Eqs. 4-5 the filter, Eqs. 6-7 the precision of
the class accuracy, Eq. 8 the weighted mean and its renormalisation. What the paper leaves open is marked "ours". Each
rule is a method; whose its formula is stands in its file in ``crad_p2p.methods``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crad_p2p.methods.table4 import WEIGHTS, Evidence
from crad_p2p.methods.uncertainty import uncertainty_weights
from crad_p2p.methods.uniform import uniform_mean

#: Keeps Eq. 8 defined for a class nobody is kept for. Larger values would already dampen well-evidenced weights.
EPSILON = 1e-12
#: A sample whose target holds less mass than this before renormalising takes Eq. 3 instead (ours).
MINIMUM_MASS = 1e-3

RULES = ("uniform", "uncertainty", *WEIGHTS)


class Screening(NamedTuple):
    """What the filter found, class by class; see :func:`screen`."""

    supported: Tensor  #: bool [J, B, C], True where teacher j has the evidence that is asked for
    consensus: Tensor  #: float64 [B, C], mean of the supported; 0 without any
    deviation: Tensor  #: float64 [J, B, C], from the consensus; infinite without support
    threshold: Tensor  #: float64 [B, C], tau, the median deviation of the supported; infinite without any
    kept: Tensor  #: bool [J, B, C]


class Aggregation(NamedTuple):
    """Targets of one batch, and how they came about."""

    target: Tensor  #: float64 [B, C], rows sum to 1
    kept: Tensor  #: bool [J, B, C], True where teacher j counted for class c of the sample
    mass: Tensor  #: float64 [B], sum of the row before it was renormalised
    collapsed: Tensor  #: bool [B], True where Eq. 3 took the place of a row without mass
    q: Tensor  #: float64 [J, B, C], what was combined
    weights: Tensor  #: float64 [J, B, C], of those who are kept, not divided by their sum; 0 for all others
    screening: Screening | None  #: None for a rule that keeps everybody


def aggregate(
    posteriors: Tensor,
    counts: Tensor,
    hits: Tensor,
    *,
    rule: str = "crad",
    min_support: int = 2,
    empty_class: str = "uniform",
    student: Tensor | None = None,
    cross_entropy: Tensor | None = None,
) -> Aggregation:
    """Combine the teachers of one batch, class by class.

    Args:
        posteriors: floating [J, B, C], each teacher's softmax at temperature T.
        counts: integer or floating [J, C], n: validation samples of class c that teacher j was measured on.
        hits: integer or floating [J, C], h: those it classified correctly.
        rule: ``uniform`` (Eq. 3) and ``uncertainty`` (weights from the entropy of each prediction) keep all teachers;
            the others have CRAD's filter, and weights of :mod:`crad_p2p.methods.table4`.
        min_support: least n for a teacher to count for a class.
        empty_class: what a class without supported teacher takes: ``uniform`` (the mean over all teachers), ``zero``
            (Eq. 8 read literally) or ``student`` (its own posterior).
        student: floating [B, C], the student's posterior at T; needed for ``empty_class="student"``.
        cross_entropy: floating [J, C], the teachers' mean cross-entropy on their class c; needed for the rule ``ce``.

    Raises:
        ValueError: no teacher, shapes that do not fit, or an unknown rule or ``empty_class``.
    """
    _check(posteriors, counts, hits, rule, empty_class, student, cross_entropy)
    with torch.autocast(posteriors.device.type, enabled=False):
        q = posteriors.double()
        if rule == "uniform":
            return _uniform(q)
        if rule == "uncertainty":
            weights = uncertainty_weights(q)
            return _complete((weights * q).sum(0), q, weights)
        n, h = counts.double(), hits.double()
        screening = screen(q, supported=n >= min_support)
        kept = screening.kept
        evidence = Evidence(n, h, None if cross_entropy is None else cross_entropy.double())
        weights = weights_of_kept(kept, WEIGHTS[rule](evidence))
        mean = _fill_empty(weighted_mean(q, weights), kept, q, empty_class, student)
        mass = mean.sum(-1)
        collapsed = mass < MINIMUM_MASS
        target = torch.where(collapsed[:, None], _uniform(q).target, mean / mass.clamp_min(MINIMUM_MASS)[:, None])
        return Aggregation(target, kept, mass, collapsed, q, weights, screening)


def screen(q: Tensor, supported: Tensor) -> Screening:
    """Eqs. 4-5: which teachers are kept, and why.

    A teacher supported for the class is kept if it deviates from the supported teachers' mean by no more than the
    median of their deviations, so ceil(k/2) of k are kept, more only where deviations tie, and both of two.

    Args:
        q: float64 [J, B, C].
        supported: bool [J, C].
    """
    supported = supported[:, None, :].expand_as(q)
    k = supported.sum(0)
    consensus = (q * supported).sum(0) / k.clamp_min(1)
    deviation = torch.where(supported, (q - consensus).abs(), torch.inf)
    ordered = deviation.sort(dim=0).values  # the unsupported come last
    middle = torch.stack([(k - 1).clamp_min(0) // 2, k // 2])
    threshold = ordered.gather(0, middle.clamp_max(len(q) - 1)).mean(0)
    kept = supported & (deviation <= threshold * (1 + 1e-9) + 1e-12)
    return Screening(supported, consensus, deviation, threshold, kept)


def weights_of_kept(kept: Tensor, weights: Tensor) -> Tensor:
    """The weights of those who are kept, and zero for all others: float64 [J, B, C].

    Where all who are kept have weight zero, they count alike (ours).

    Args:
        kept: bool [J, B, C].
        weights: float64 [J, C], w >= 0 of teacher j for class c.
    """
    w = weights[:, None, :] * kept
    is_weightless = w.sum(0) == 0  # or nobody is kept, which stays so
    if bool(is_weightless.any()):
        w = torch.where(is_weightless, kept.to(w.dtype), w)
    return w


def weighted_mean(q: Tensor, weights: Tensor) -> Tensor:
    """Eq. 8 before it is renormalised: float64 [B, C]; zero where nobody has a weight.

    Args:
        q: float64 [J, B, C].
        weights: float64 [J, B, C], as :func:`weights_of_kept` gives them.
    """
    return (weights * q).sum(0) / (weights.sum(0) + EPSILON)


def mixture(q: Tensor, weights: Tensor) -> Aggregation:
    """Everybody counts, by fixed weights.

    Args:
        q: float64 [K, B, C].
        weights: float64 [K], they sum to 1.
    """
    weights = weights[:, None, None]
    return _complete((weights * q).sum(0), q, weights)


def _fill_empty(mean: Tensor, kept: Tensor, q: Tensor, empty_class: str, student: Tensor | None) -> Tensor:
    if empty_class == "zero":
        return mean
    fallback = q.mean(0) if student is None or empty_class == "uniform" else student.double()
    return torch.where(kept.any(0), mean, fallback)


def _uniform(q: Tensor) -> Aggregation:
    """Eq. 3."""
    return _complete(uniform_mean(q), q, q.new_ones(1))


def _complete(mean: Tensor, q: Tensor, weights: Tensor) -> Aggregation:
    """The result of a rule that keeps every teacher; ``weights`` have a shape that can become that of ``q``."""
    mass = mean.sum(-1)
    return Aggregation(
        target=mean / mass[:, None],
        kept=torch.ones_like(q, dtype=torch.bool),
        mass=mass,
        collapsed=torch.zeros_like(mass, dtype=torch.bool),
        q=q,
        weights=weights.expand_as(q),
        screening=None,
    )


def _check(
    q: Tensor,
    counts: Tensor,
    hits: Tensor,
    rule: str,
    empty_class: str,
    student: Tensor | None,
    cross_entropy: Tensor | None,
) -> None:
    if q.ndim != 3 or len(q) == 0:
        raise ValueError(
            f"posteriors must be [teachers, batch, classes] with at least one teacher, found {tuple(q.shape)}"
        )
    expected = (q.shape[0], q.shape[2])
    for name, value in (("counts", counts), ("hits", hits)):
        if value.shape != expected:
            raise ValueError(f"{name} must be [teachers, classes] = {expected}, found {tuple(value.shape)}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, found {rule!r}")
    if empty_class not in ("uniform", "zero", "student"):
        raise ValueError(f"empty_class must be uniform, zero or student, found {empty_class!r}")
    if empty_class == "student" and (student is None or student.shape != q.shape[1:]):
        raise ValueError(f"empty_class='student' needs the student's posterior [batch, classes] = {tuple(q.shape[1:])}")
    if rule == "ce" and (cross_entropy is None or cross_entropy.shape != expected):
        raise ValueError(f"rule='ce' needs the teachers' cross-entropy [teachers, classes] = {expected}")
