"""Aggregation and losses written a second time, from their descriptions, one number after the other.

Nothing here is shared with ``crad_p2p``: plain lists, loops, and exact fractions where numbers are compared, so that no
rounding decides who is kept.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

EPSILON = Fraction(1, 10**12)


class Result(NamedTuple):
    """Like ``crad_p2p.aggregation.Aggregation``, as nested lists."""

    target: list[list[float]]  # [B][C]
    kept: list[list[list[bool]]]  # [J][B][C]
    mass: list[float]  # [B]
    collapsed: list[bool]  # [B], True where Eq. 3 took the place of the target


def precision(n: int, h: int) -> float:
    """Step 3 for one teacher and one class."""
    accuracy = Fraction(h + 2, n + 4)
    variance = accuracy * (1 - accuracy) / (n + 4)
    return float(1 / (variance + EPSILON))


def shares(rule: str, n: dict[int, int], h: dict[int, int], cross_entropy: dict[int, float]) -> dict[int, float]:
    """Step 3: which share of a class each of those who are kept has, by id; without any weight all have the same."""
    raw: dict[int, float] = {}
    for j in n:
        accuracy = Fraction(h[j] + 2, n[j] + 4)
        variance = accuracy * (1 - accuracy) / (n[j] + 4)
        if rule in ("crad", "precision"):
            raw[j] = precision(n[j], h[j])
        elif rule == "stage1":
            raw[j] = 1.0
        elif rule == "acc":
            raw[j] = float(Fraction(h[j], n[j])) if n[j] else 0.0
        elif rule == "sup":
            raw[j] = float(n[j])
        elif rule == "sm":  # a softmax as one writes it down, over those who are kept
            others = [Fraction(h[k] + 2, n[k] + 4) for k in n]
            scores = [a * (1 - a) / (n[k] + 4) for a, k in zip(others, n, strict=True)]
            raw[j] = math.exp(-float(variance)) / math.fsum(math.exp(-float(score)) for score in scores)
        elif rule == "lcb":
            raw[j] = max(0.0, float(accuracy) - math.sqrt(float(variance)))
        elif rule == "ce":
            raw[j] = 1 / (cross_entropy[j] + 0.001)
        elif rule == "inv_sigma":
            raw[j] = 1 / math.sqrt(float(variance + EPSILON))
        else:
            raise AssertionError(rule)
    total = math.fsum(raw.values())
    if total == 0:
        return {j: 1 / len(raw) for j in raw}
    # Equation 8 has epsilon beside the sum.
    return {j: weight / (total + float(EPSILON)) for j, weight in raw.items()} if rule != "sm" else raw


def median(values: list[Fraction]) -> Fraction:
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def survivors(values: dict[int, float]) -> set[int]:
    """Step 2: which of the supported teachers (id to posterior of one class) are kept."""
    if not values:
        return set()
    exact = {teacher: Fraction(value) for teacher, value in values.items()}
    consensus = sum(exact.values(), Fraction(0)) / len(exact)
    deviation = {teacher: abs(value - consensus) for teacher, value in exact.items()}
    limit = median(list(deviation.values())) * (1 + Fraction(1, 10**9)) + Fraction(1, 10**12)
    return {teacher for teacher, value in deviation.items() if value <= limit}


def plain_mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def entropy(row: list[float]) -> float:
    return -math.fsum(p * math.log(p) for p in row if p > 0)


def aggregate(
    q: list[list[list[float]]],
    n: list[list[int]],
    h: list[list[int]],
    *,
    rule: str = "crad",
    min_support: int = 2,
    empty_class: str = "uniform",
    student: list[list[float]] | None = None,
    cross_entropy: list[list[float]] | None = None,
) -> Result:
    """Target of every sample, for q[J][B][C], n[J][C], h[J][C], cross_entropy[J][C]."""
    teachers, samples, classes = range(len(q)), range(len(q[0])), range(len(n[0]))
    kept = [[[False for _ in classes] for _ in samples] for _ in teachers]
    target, mass, collapsed = [], [], []
    for b in samples:
        equation_3 = [plain_mean([q[j][b][c] for j in teachers]) for c in classes]
        row = []
        if rule == "uniform":
            row = equation_3
        elif rule == "uncertainty":
            scores = [math.exp(-entropy(q[j][b])) for j in teachers]
            parts = [score / math.fsum(scores) for score in scores]
            row = [math.fsum(parts[j] * q[j][b][c] for j in teachers) for c in classes]
        if rule in ("uniform", "uncertainty"):
            for j in teachers:
                kept[j][b] = [True for _ in classes]
        else:
            for c in classes:
                supported = {j: q[j][b][c] for j in teachers if n[j][c] >= min_support}
                chosen = survivors(supported)
                for j in chosen:
                    kept[j][b][c] = True
                if chosen:
                    surprise = {j: cross_entropy[j][c] if cross_entropy else math.nan for j in chosen}
                    share = shares(rule, {j: n[j][c] for j in chosen}, {j: h[j][c] for j in chosen}, surprise)
                    row.append(math.fsum(share[j] * q[j][b][c] for j in chosen))
                elif empty_class == "uniform":
                    row.append(equation_3[c])
                elif empty_class == "zero":
                    row.append(0.0)
                else:
                    assert student is not None
                    row.append(student[b][c])
        total = math.fsum(row)
        mass.append(total)
        collapsed.append(total < 1e-3)
        target.append(equation_3 if collapsed[-1] else [value / total for value in row])
    return Result(target, kept, mass, collapsed)


# --- losses -----------------------------------------------------------------------------------------------------------


def log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    total = top + math.log(math.fsum(math.exp(z - top) for z in row))
    return [z - total for z in row]


def cross_entropy(z: list[list[float]], y: list[int]) -> float:
    return plain_mean([-log_softmax(row)[label] for row, label in zip(z, y, strict=True)])


def kl(q: list[float], log_p: list[float]) -> float:
    """KL(q || p)."""
    return math.fsum(a * (math.log(a) - b) for a, b in zip(q, log_p, strict=True) if a > 0)


def mean_kl(q: list[list[float]], z: list[list[float]], temperature: float) -> float:
    """KL(q || softmax(z/T)), the mean over samples."""
    students = [log_softmax([value / temperature for value in row]) for row in z]
    return plain_mean([kl(a, b) for a, b in zip(q, students, strict=True)])


def fedmkd_loss(
    z: list[list[float]],
    y: list[int],
    peers: list[list[list[float]]],
    memory: list[list[float]],
    *,
    weight: float,
    temperature: float,
    share: float,
) -> float:
    """(1 - lambda) CE + lambda T^2 [(1 - g) KL(mean of the peers || p) + g KL(memory || p)], for peers[J][B][C]."""
    samples, classes = range(len(z)), range(len(z[0]))
    mean = [[plain_mean([q[b][c] for q in peers]) for c in classes] for b in samples]
    towards = (1 - share) * mean_kl(mean, z, temperature) + share * mean_kl(memory, z, temperature)
    return (1 - weight) * cross_entropy(z, y) + weight * temperature**2 * towards


def weighted_softmax_loss(z: list[list[float]], y: list[int], counts: list[int]) -> float:
    """-log of b_y e^{z_y} / sum_k b_k e^{z_k}, the mean over samples; b the share of each class, none of which is so
    rare that it could not be written down.
    """
    b = [n / sum(counts) for n in counts]
    losses = []
    for row, label in zip(z, y, strict=True):
        below = math.fsum(b[k] * math.exp(row[k]) for k in range(len(row)))
        losses.append(-math.log(b[label] * math.exp(row[label]) / below))
    return plain_mean(losses)


def dfml_loss(
    z: list[list[float]],
    y: list[int],
    peers: list[list[list[float]]],
    parameters: list[int],
    counts: list[int],
    *,
    alpha: float,
    temperature: float = 1.0,
) -> float:
    """(1 - alpha) L_WSM + alpha T^2 sum_j Phi_j / (sum of Phi) KL(p_j || p), for peers[J][B][C]."""
    mutual = math.fsum(
        phi / sum(parameters) * mean_kl(q, z, temperature) for phi, q in zip(parameters, peers, strict=True)
    )
    return (1 - alpha) * weighted_softmax_loss(z, y, counts) + alpha * temperature**2 * mutual


# --- predictions on a transfer set ------------------------------------------------------------------------------------


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    return [math.exp(z) for z in log_softmax([value / temperature for value in row])]


def fedmd_loss(z: list[list[float]], predictions: list[list[list[float]]]) -> float:
    """Mean absolute error of z[B][C] to the mean of predictions[N][B][C]."""
    errors = []
    for b, row in enumerate(z):
        for c, value in enumerate(row):
            errors.append(abs(value - plain_mean([said[b][c] for said in predictions])))
    return plain_mean(errors)


def msfkd_target(
    rows: list[list[float]], *, temperature: float, keep_quantile: float = 0.5, require_plurality: bool = True
) -> list[float] | None:
    """What is learned of one image of which N peers said these logits; None if it is dropped."""
    confidence = [max(softmax(row)) for row in rows]
    ordered, place = sorted(confidence), keep_quantile * (len(rows) - 1)
    below = int(place + 1e-9)
    above = min(below + 1, len(rows) - 1)
    limit = ordered[below] + max(0.0, place - below) * (ordered[above] - ordered[below])
    sure = [j for j in range(len(rows)) if confidence[j] >= limit]
    if require_plurality:
        said = [row.index(max(row)) for row in rows]
        votes = {c: said.count(c) for c in said}
        most = [c for c in votes if votes[c] == max(votes.values())]
        if len(most) != 1:
            return None
        sure = [j for j in sure if said[j] == most[0]]
    if not sure:
        return None
    posteriors = [softmax(rows[j], temperature) for j in sure]
    return [plain_mean([q[c] for q in posteriors]) for c in range(len(rows[0]))]
