"""What every method answers, and what it is given. The package's docstring says how other kinds of method fit in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from crad_p2p.aggregation import Aggregation
from crad_p2p.distillation import Objective
from crad_p2p.federation import Federation
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.together import Together

#: The targets of a batch, from the teachers' posteriors [J, B, C] and what the student says itself, [B, C]: its memory
#: for methods that have one, else its own posterior, which those alone need whose ``empty_class`` is ``student``.
Combination = Callable[[Tensor, Tensor | None], Aggregation]


@dataclass(frozen=True)
class Student:
    """What a method may know of the peer that learns by it, for the whole run.

    Attributes:
        classes: number of classes.
        channels: of an image.
        label_counts: own training images of every class; they never leave the peer.
    """

    classes: int
    channels: int
    label_counts: tuple[int, ...]


@dataclass(frozen=True)
class Lesson:
    """What there is to learn from in one round.

    Attributes:
        number: of the round.
        teachers: the manifests of those who taught, in id order; none in warm-up rounds, or if nobody could.
        posteriors: their softmax, at the method's temperature, on a batch of the local epoch given by its place there:
            float32 [J, B, C] on the CPU, J in the order of ``teachers``.
        memory: that of the student's own model as it was when the round began: float32 [B, C] on the CPU; for methods
            that have a memory, in rounds with teachers.
        predictions: logits of the transfer set, float32 [N, S, C] on the CPU, as they were published: those of the
            teachers and the student's own of its last round, in id order; for methods that publish predictions, in
            rounds with teachers, else None. In the round after one in which the images were made there are none yet.
        places: int64 [K], ascending: which of the S images are there; None for all.
    """

    number: int
    teachers: tuple[Manifest, ...]
    posteriors: Callable[[slice], Tensor]
    memory: Callable[[slice], Tensor]
    predictions: Tensor | None = None
    places: Tensor | None = None


class Digest(NamedTuple):
    """What a student learns from a transfer set.

    Attributes:
        places: int64 [K], ascending: those of the S images that are used.
        targets: float [K, ...] on the CPU, in that order.
        loss: a scalar from the student's logits [B, C] and the targets of a batch, on the same device.
        is_beside: it is learned beside the own images, a batch of each in every step, whose losses are added; else in
            one epoch before theirs.
    """

    places: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    is_beside: bool = False


class Method(ABC):
    """One student's side of a method; made once for a run."""

    def __init__(self, federation: Federation, student: Student) -> None:
        self._federation = federation
        self._settings = federation.method
        self._student = student

    @property
    def temperature(self) -> float:
        """T of the teachers' softmax."""
        return self._settings.temperature

    def combination(self, statistics: Sequence[ClassStatistics]) -> Combination | None:
        """How the words of teachers with these class statistics become one target; None for a method without one."""
        del statistics
        return None

    @abstractmethod
    def objective(self, lesson: Lesson) -> Objective:
        """What the student minimises in one round. It may be used several times, if training diverges."""

    def digest(self, lesson: Lesson) -> Digest | None:
        """What is learned from the transfer set; None for nothing."""
        del lesson
        return None

    def together(self, number: int, archs: Mapping[int, str]) -> Together | None:
        """What all models minimise in a round in which this student trains them at once; None if it never does.

        Args:
            archs: of all peers, by id.
        """
        del number, archs
        return None

    def after_round(self, number: int, model: nn.Module) -> None:
        """Called once a round has been trained, before it is validated and published; most methods do nothing."""
        del number, model

    def state(self) -> dict[str, Tensor]:
        """What must be kept beside model and momentum from round to round; it never leaves the peer."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a :meth:`state` back; it is empty at the start, and after the checkpoint was lost with a disk.

        Raises:
            ValueError: it is no state of this method.
        """
        if state:
            raise ValueError(f"{self._settings.name} keeps nothing, and it holds '{min(state)}'")
