"""FedMKD (Lin, Tan, Liu, ICC 2025), as the CRAD paper adapts it to peers without a server.

The original has a server whose global model every client blends with its own model of the last round, in parameter
space; no code of it is public, and its text could not be read. The CRAD paper says of its adaptation that it "reuses
each client's own previous-round model as an additional teacher". All else is ours:

    L = (1 - lambda) CE + lambda T^2 [ (1 - g) KL(q_peers || p) + g KL(q_memory || p) ]

* q_peers is the uniform mean of all teachers' posteriors, which stands for the global model.
* q_memory is that of the student's own model as it is when the round begins, in eval mode on the same augmented images:
  a frozen copy, which costs no traffic.
* g is ``fedmkd.memory_weight``: ``half`` is 1/2; ``uniform`` is 1 / (number of peers that taught + 1), so that the
  memory is one more teacher in the mean.
* Without any peer that taught the loss is the cross-entropy at weight 1; the memory alone teaches nobody.

Blending in parameter space (``blend_init`` of the original) is not built: it works between equal architectures only.
A peer publishes its model. The log's ``target_…`` numbers are those of (1 - g) q_peers + g q_memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from crad_p2p.aggregation import Aggregation, mixture
from crad_p2p.distillation import Objective, Step, divergence, own_labels
from crad_p2p.federation import FedMkdSettings
from crad_p2p.manifest import ClassStatistics
from crad_p2p.methods.interface import Combination, Lesson, Method
from crad_p2p.methods.uniform import uniform_mean


def memory_share(memory_weight: str, teachers: int) -> float:
    """g, for so many peers that taught."""
    return 0.5 if memory_weight == "half" else 1 / (teachers + 1)


class FedMkd(Method):
    """Two targets: what the peers say on average, and what the student itself said before."""

    def combination(self, statistics: Sequence[ClassStatistics]) -> Combination:
        weights = self._weights(len(statistics))

        def combine(posteriors: Tensor, memory: Tensor | None) -> Aggregation:
            assert memory is not None
            return mixture(torch.stack([uniform_mean(posteriors.double()), memory.double()]), weights)

        return combine

    def objective(self, lesson: Lesson) -> Objective:
        if not lesson.teachers:
            return own_labels
        combine = self.combination([teacher.statistics for teacher in lesson.teachers])
        weights = self._weights(len(lesson.teachers))
        temperature, weight = self.temperature, self._settings.distillation_weight

        def objective(batch: slice, logits: Tensor, labels: Tensor) -> Step:
            aggregation = combine(lesson.posteriors(batch), lesson.memory(batch))
            towards = divergence(logits / temperature, aggregation.q, weights)
            loss = (1 - weight) * F.cross_entropy(logits, labels) + weight * temperature**2 * towards
            return Step(loss, aggregation)

        return objective

    def _weights(self, teachers: int) -> Tensor:
        """Of the peers' mean and of the memory, float64 [2]."""
        share = memory_share((self._settings.fedmkd or FedMkdSettings()).memory_weight, teachers)
        return torch.tensor([1 - share, share], dtype=torch.float64)
