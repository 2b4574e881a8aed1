"""The aggregation written a second time, from the text of DESIGN section 5, one number after the other.

Nothing here is shared with ``crad_p2p.aggregation``: plain lists, loops, and exact fractions where numbers are
compared, so that no rounding decides who is kept.
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
) -> Result:
    """Target of every sample, for q[J][B][C], n[J][C], h[J][C]."""
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
            shares = [score / math.fsum(scores) for score in scores]
            row = [math.fsum(shares[j] * q[j][b][c] for j in teachers) for c in classes]
        if rule in ("uniform", "uncertainty"):
            for j in teachers:
                kept[j][b] = [True for _ in classes]
        else:
            for c in classes:
                supported = {j: q[j][b][c] for j in teachers if n[j][c] >= min_support}
                chosen = survivors(supported)
                for j in chosen:
                    kept[j][b][c] = True
                weight = {j: precision(n[j][c], h[j][c]) if rule == "crad" else 1.0 for j in chosen}
                if chosen:
                    above = math.fsum(weight[j] * q[j][b][c] for j in chosen)
                    row.append(above / (math.fsum(weight.values()) + float(EPSILON)))
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
