"""DFML (TMLR 2024, arXiv 2402.01863), in the source's mode, ``aggregator``, and in one of ours, ``symmetric``.

The source's, as far as summaries of it tell (no code is public):

* L = (1 - alpha) L_WSM + alpha L_KL, with alpha cycling over the rounds;
* L_WSM is the re-weighted softmax cross-entropy of Legate et al.: log p_c = log b_c + z_c - logsumexp_k(log b_k + z_k)
  with the class proportions b of the data that is trained on. A class that is not in them gets no push;
* L_KL, from memory: the sum over the other models j of Phi_j / (sum of their Phi) KL(p_j || p), Phi the number of
  trainable parameters, at T = 1; p_j is a constant;
* from memory, too: a random client, the *aggregator* of the round, trains all models on its data at once, and gives
  them back;
* a *peak model*, refreshed when alpha is largest, is what is evaluated.

Mode ``aggregator`` is that, and ours in it:

* *all* models are trained, for one epoch: for each batch the logits of all, and then one step of each. The source has
  the models of some random clients there, and an unknown number of epochs;
* whose turn it is, is drawn from the seed: an order of all peers, and when all have been, another. Learning rate, clip
  and weight decay are the federation's; momentum begins at zero in every round, since it would be with the last
  aggregator;
* the aggregator of round r publishes all models in one file, and every peer takes its own up in round r + 1. So what is
  published, measured and reported as round r + 1 of *every* peer, the aggregator's included, are the models that were
  trained in round r; in the last round nobody trains, since nobody would take it up;
* all others publish the sha256 of their model, and do nothing.

Mode ``symmetric`` is ours: every student trains its own model alone, on its own data, with its own b, and the others
are frozen as they were after the last round; so all peers are busy, and a peer publishes its model as in every other
method here. Ours in both:

* alpha(r) = alpha_min + (alpha_max - alpha_min) (1 - cos(2 pi r / period)) / 2, from 0 to 0.8 in a period of 10 rounds.
  The source's amplitude, period and whether it decays are unknown;
* b_c is the share of class c in the training images of who trains. log b is -1e9 where there is none. (b of the label
  is a constant of the loss, and so without any effect on training.)
* the temperature of the KL is ``dfml.temperature``, with its square as factor; ``method.temperature`` and
  ``method.distillation_weight`` have no part in this method, nor have the class statistics;
* a student copies its model as its peak once it has been trained in a round r with r mod period = period / 2: at the
  end of that round or, if another one trains, when it takes it up. A peer that has no part in such a round keeps its
  older peak;
* *both* accuracies are reported, that of the peak as ``peak_global_accuracy`` and ``peak_local_accuracy``; before the
  first peak they are those of the model itself. The best round is chosen by the models of the round, as in every other
  method, and the peak is then the newest one as of that round;
* without teachers (``symmetric`` in warm-up rounds, or if none came in time) the loss is L_WSM at weight 1.

The log's ``target_…`` numbers are those of the mean of the p_j by their Phi, with ``symmetric`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crad_p2p.aggregation import mixture
from crad_p2p.architectures import parameter_count
from crad_p2p.distillation import Objective, Step, divergence
from crad_p2p.federation import DfmlSettings, Federation
from crad_p2p.methods.interface import Lesson, Method, Student
from crad_p2p.together import Together

#: log b of a class without training images.
ABSENT = -1e9


def alpha(number: int, settings: DfmlSettings) -> float:
    """The weight of the others in a round: least at multiples of the period, largest halfway between."""
    phase = (1 - math.cos(2 * math.pi * number / settings.period)) / 2
    return settings.alpha_min + (settings.alpha_max - settings.alpha_min) * phase


def is_peak(number: int, settings: DfmlSettings) -> bool:
    """Whether alpha is largest in this round."""
    return number % settings.period == settings.period // 2


def log_proportions(label_counts: Sequence[int]) -> Tensor:
    """log b, float32 [C]; all zero without any image."""
    counts = torch.tensor(label_counts, dtype=torch.float64)
    if not counts.sum():
        return torch.zeros(len(counts))
    return (counts / counts.sum()).log().clamp_min(ABSENT).float()


def weighted_softmax_loss(logits: Tensor, labels: Tensor, log_b: Tensor) -> Tensor:
    """L_WSM, the mean over the batch.

    Args:
        logits: float [B, C].
        labels: int64 [B].
        log_b: float [C].
    """
    return F.cross_entropy(logits + log_b, labels)


def size_weights(parameters: Sequence[int]) -> Tensor:
    """Phi_j / sum of all Phi, float64 [J]."""
    phi = torch.tensor(parameters, dtype=torch.float64)
    return phi / phi.sum()


class Dfml(Method):
    """Mutual learning with the others' last models."""

    def __init__(self, federation: Federation, student: Student) -> None:
        super().__init__(federation, student)
        self._own = federation.method.dfml or DfmlSettings()
        self._log_b = log_proportions(student.label_counts)
        self._peak: dict[str, Tensor] = {}

    @property
    def temperature(self) -> float:
        return self._own.temperature

    def objective(self, lesson: Lesson) -> Objective:
        weight = alpha(lesson.number, self._own) if lesson.teachers else 0.0
        sizes = [
            parameter_count(teacher.arch, classes=self._student.classes, channels=self._student.channels)
            for teacher in lesson.teachers
        ]
        weights, temperature = size_weights(sizes), self.temperature

        def objective(batch: slice, logits: Tensor, labels: Tensor) -> Step:
            own = weighted_softmax_loss(logits, labels, self._log_b.to(logits))
            if not lesson.teachers:
                return Step(own, None)
            q = lesson.posteriors(batch).double()
            mutual = temperature**2 * divergence(logits / temperature, q, weights)
            return Step((1 - weight) * own + weight * mutual, mixture(q, weights))

        return objective

    def together(self, number: int, archs: Mapping[int, str]) -> Together | None:
        peers, temperature = sorted(archs), self.temperature
        weight = alpha(number, self._own) if len(peers) > 1 else 0.0
        sizes = [
            parameter_count(archs[peer], classes=self._student.classes, channels=self._student.channels)
            for peer in peers
        ]

        def together(logits: Mapping[int, Tensor], labels: Tensor) -> dict[int, Tensor]:
            z = torch.stack([logits[peer].detach() for peer in peers])
            q = torch.softmax(z.float() / temperature, -1).cpu().double()
            losses = {}
            for place, peer in enumerate(peers):
                loss = (1 - weight) * weighted_softmax_loss(logits[peer], labels, self._log_b.to(logits[peer]))
                if len(peers) > 1:
                    others = [each for each in range(len(peers)) if each != place]
                    weights = size_weights([sizes[each] for each in others])
                    mutual = divergence(logits[peer] / temperature, q[others], weights)
                    loss = loss + weight * temperature**2 * mutual
                losses[peer] = loss
            return losses

        return together if self._settings.aggregates else None

    def after_round(self, number: int, model: nn.Module) -> None:
        if is_peak(number - self._settings.aggregates, self._own):  # who takes a model up does so a round later
            self._peak = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}

    def state(self) -> dict[str, Tensor]:
        return self._peak

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._peak = dict(state)
