"""Methods that differ in their target alone: Eq. 9 towards what :func:`crad_p2p.aggregation.aggregate` makes of the
teachers' posteriors, by the rule of the method's name.

* What is published (the paper's): a model every round, and per class the counts n and h of the validation images.
* The student's loss (the paper's): (1 - lambda) CE + lambda T^2 KL(target || student).
* Without teachers (ours): the cross-entropy at weight 1.

``crad`` and its variants are in ``table4``, Eq. 3 in ``uniform``, and ``uncertainty`` has a file of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crad_p2p.aggregation import Aggregation, aggregate
from crad_p2p.distillation import Objective, Step, distillation_loss, own_labels
from crad_p2p.manifest import ClassStatistics
from crad_p2p.methods.interface import Combination, Lesson, Method
from crad_p2p.teachers import posterior_of_logits


class Backbone(Method):
    """The rule has the method's name."""

    def combination(self, statistics: Sequence[ClassStatistics]) -> Combination:
        settings = self._settings
        counts = torch.tensor([each.counts for each in statistics])
        hits = torch.tensor([each.hits for each in statistics])
        cross_entropy = _cross_entropy(statistics) if settings.traits.publishes_cross_entropy else None

        def combine(posteriors: Tensor, student: Tensor | None) -> Aggregation:
            return aggregate(
                posteriors,
                counts,
                hits,
                rule=settings.name,
                min_support=settings.min_support,
                empty_class=settings.empty_class,
                student=student,
                cross_entropy=cross_entropy,
            )

        return combine

    def objective(self, lesson: Lesson) -> Objective:
        if not lesson.teachers:
            return own_labels
        settings = self._settings
        combine = self.combination([teacher.statistics for teacher in lesson.teachers])

        def objective(batch: slice, logits: Tensor, labels: Tensor) -> Step:
            student = None  # unless it is needed: a GPU would be waited for
            if settings.empty_class == "student":
                student = posterior_of_logits(logits.detach(), settings.temperature).cpu()
            aggregation = combine(lesson.posteriors(batch), student)
            target = aggregation.target.float().to(logits.device)  # MPS has no float64
            loss = distillation_loss(
                logits, labels, target, temperature=settings.temperature, weight=settings.distillation_weight
            )
            return Step(loss, aggregation)

        return objective


def _cross_entropy(statistics: Sequence[ClassStatistics]) -> Tensor:
    """Float64 [J, C]."""
    return torch.tensor([each.cross_entropy for each in statistics], dtype=torch.float64)
