"""Why the target of one image is as it is: who was dropped for which class, why, and how much each other one counted.

The filter, the weights and the target are the method's own (:meth:`crad_p2p.methods.interface.Method.combination`);
here they are only read off and put into words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crad_p2p.aggregation import MINIMUM_MASS, Aggregation, Screening
from crad_p2p.federation import Federation
from crad_p2p.manifest import ClassStatistics
from crad_p2p.methods.build import build_method
from crad_p2p.methods.interface import Student

#: Whose word it is, of what architecture, and what is known of it.
_Voice = tuple[str, str | None, ClassStatistics | None]

#: A class with at least so much of the target is always worth a look.
NOTABLE_MASS = 0.05


@dataclass(frozen=True)
class Teacher:
    """A peer's model, and what it says of the image.

    Attributes:
        round: of its snapshot.
        posterior: its softmax at the method's temperature, one number a class.
    """

    peer: int
    arch: str
    round: int
    statistics: ClassStatistics
    posterior: tuple[float, ...]


@dataclass(frozen=True)
class Opinion:
    """What one voice says of one class, and what became of it.

    Attributes:
        voice: of whom: ``peer 3``; with ``fedmkd`` the peers' mean and the memory.
        arch: None for the peers' mean.
        counts, hits: validation images of the class, and those recognised, as published; None for methods without a
            filter, which do not look at them.
        deviation: from the consensus; None without support, or without a filter.
        weight: share of the class's mean, 0 to 1; all 0 where nobody has support.
        verdict: in words.
    """

    voice: str
    arch: str | None
    counts: int | None
    hits: int | None
    probability: float
    deviation: float | None
    kept: bool
    weight: float
    verdict: str


@dataclass(frozen=True)
class ClassExplanation:
    """One class of the image's target.

    Attributes:
        target: its part of the target.
        consensus, threshold: mean and median deviation (tau) of those with support; None without any, or without a
            filter.
        note: what was done where nobody has support.
    """

    label: int
    target: float
    consensus: float | None
    threshold: float | None
    opinions: tuple[Opinion, ...]
    note: str | None


@dataclass(frozen=True)
class Explanation:
    """Of one image, for one student.

    Attributes:
        target: one number a class; they sum to 1.
        mass: its sum before it was renormalised.
        collapsed: whether the plain mean took its place, for want of mass.
        classes: all of them, by label.
    """

    target: tuple[float, ...]
    mass: float
    collapsed: bool
    has_filter: bool
    classes: tuple[ClassExplanation, ...]


def explain(federation: Federation, teachers: Sequence[Teacher], own: Teacher) -> Explanation:
    """How these teachers' words on one image become the target of a student.

    Args:
        teachers: at least one, in id order.
        own: the student's own model, which is the memory of a method that has one.

    Raises:
        ValueError: the federation's method has no target that is made of its teachers' words.
    """
    classes = len(own.posterior)
    method = build_method(federation, Student(classes, 1, (0,) * classes))
    combine = method.combination([teacher.statistics for teacher in teachers])
    if combine is None:
        raise ValueError(f"method {federation.method.name} has no target")
    posteriors = torch.tensor([teacher.posterior for teacher in teachers])[:, None]
    found = combine(posteriors, torch.tensor([own.posterior]))
    voices: list[_Voice]
    if federation.method.traits.has_memory:
        number = len(teachers)
        mean = f"mean of {number} peers" if number > 1 else f"peer {teachers[0].peer}"
        voices = [(mean, None, None), (f"memory of peer {own.peer}", own.arch, None)]
    else:
        voices = [(f"peer {each.peer}", each.arch, each.statistics) for each in teachers]
    reader = _Reader(federation, found, voices, own)
    return Explanation(
        target=tuple(found.target[0].tolist()),
        mass=float(found.mass[0]),
        collapsed=bool(found.collapsed[0]),
        has_filter=found.screening is not None,
        classes=tuple(reader.read(label) for label in range(classes)),
    )


def labels_that_matter(explanation: Explanation, own: Teacher, truth: int | None) -> dict[int, list[str]]:
    """Labels of the classes to show, and why each: the true one, the target's, the student's, and all with
    :data:`NOTABLE_MASS`, the largest first.
    """
    found: dict[int, list[str]] = {}
    for label, reason in (
        (truth, "the true class"),
        (top(explanation.target), "the target's top class"),
        (top(own.posterior), "the student's top class"),
    ):
        if label is not None:
            found.setdefault(label, []).append(reason)
    for label in largest(explanation.target, len(explanation.target)):
        if explanation.target[label] >= NOTABLE_MASS:
            found.setdefault(label, [])
    return found


def top(values: Sequence[float]) -> int:
    """The label of the largest value, of equal ones the first."""
    return max(range(len(values)), key=values.__getitem__)


def largest(values: Sequence[float], count: int) -> list[int]:
    """Labels of the largest values, the largest first."""
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)[:count]


def collapse(mass: float) -> str:
    """What to say of a target that was left without mass."""
    return (
        f"What was kept sums to {mass:.1e}, less than {MINIMUM_MASS:g}, so the target is the plain mean of all "
        f"teachers (Eq. 3), whatever is said of the classes."
    )


class _Reader:
    """Reads an aggregation of one sample class by class."""

    def __init__(
        self,
        federation: Federation,
        found: Aggregation,
        voices: Sequence[_Voice],
        own: Teacher,
    ) -> None:
        self._settings = federation.method
        self._found = found
        self._voices = voices
        self._own = own

    def read(self, label: int) -> ClassExplanation:
        found, screening = self._found, self._found.screening
        total = float(found.weights[:, 0, label].sum())
        has_support = screening is None or bool(screening.supported[:, 0, label].any())
        return ClassExplanation(
            label=label,
            target=float(found.target[0, label]),
            consensus=float(screening.consensus[0, label]) if screening and has_support else None,
            threshold=float(screening.threshold[0, label]) if screening and has_support else None,
            opinions=tuple(self._opinion(place, label, total) for place in range(len(self._voices))),
            note=None if has_support else self._of_nobody(label),
        )

    def _opinion(self, place: int, label: int, total: float) -> Opinion:
        voice, arch, statistics = self._voices[place]
        found, screening = self._found, self._found.screening
        counted = statistics if screening else None
        at = (place, 0, label)
        deviation = _finite(screening.deviation[at]) if screening else None
        return Opinion(
            voice=voice,
            arch=arch,
            counts=counted.counts[label] if counted else None,
            hits=counted.hits[label] if counted else None,
            probability=float(found.q[at]),
            deviation=deviation,
            kept=bool(found.kept[at]),
            weight=float(found.weights[at]) / total if total else 0.0,
            verdict=self._verdict(screening, at, counted.counts[label] if counted else 0),
        )

    def _verdict(self, screening: Screening | None, at: tuple[int, int, int], count: int) -> str:
        place, _, label = at
        if bool(self._found.kept[at]):
            return "kept"
        assert screening is not None
        if not bool(screening.supported[at]):
            images = f"{count or 'no'} validation image{'' if count == 1 or not count else 's'}"
            return f"dropped: {images} of the class, {self._settings.min_support} needed"
        deviation, median = apart(float(screening.deviation[place, 0, label]), float(screening.threshold[0, label]))
        consensus = f"{float(screening.consensus[0, label]):.2f}"
        return f"dropped: {deviation} from the consensus {consensus}, more than the median {median}"

    def _of_nobody(self, label: int) -> str:
        least, taken = self._settings.min_support, self._settings.empty_class
        mean = float(self._found.q[:, 0, label].mean())
        what = {
            "uniform": f"the class takes the plain mean of all teachers, {mean:.2f}",
            "zero": "the class takes nothing",
            "student": f"the class takes what the student itself says, {self._own.posterior[label]:.2f}",
        }[taken]
        images = f"{least} validation image{'' if least == 1 else 's'}"
        return (
            f"No teacher has {images} of the class: {what}, before the target is renormalised (empty_class: {taken})."
        )


def apart(one: float, other: float) -> tuple[str, str]:
    """Two different numbers with so many digits that they can be told apart, from two on."""
    digits = next((n for n in range(2, 10) if f"{one:.{n}f}" != f"{other:.{n}f}"), 10)
    return f"{one:.{digits}f}", f"{other:.{digits}f}"


def _finite(value: Tensor) -> float | None:
    return float(value) if math.isfinite(value) else None
