"""FedMD (Li, Wang, arXiv 1910.03581; its official code), among peers without a server.

The source's:

* what is exchanged are logits, before any softmax, on a set of images that all have;
* the consensus is their plain mean over *all* parties, oneself included, without a temperature;
* the student first *digests* it, one epoch of the mean absolute error between its logits and the consensus, and then
  *revisits* its own images with their labels.

Ours:

* the transfer set is cut out of the training set, its labels are dropped, and it is the same images in every round; the
  source draws 5,000 of a public set anew each round;
* there is no training on public labels beforehand, which other methods have not either;
* every peer makes the consensus itself, summed in float64 in the order of the ids, so that all have the same one;
* digest and revisit are one epoch each, at the federation's batch size, and by its one optimiser, whose momentum goes
  on from one to the other; the source has Adam, and 4 to 10 epochs of revisit;
* images of the transfer set are not augmented, since they were not when the others spoke of them;
* round 1 is private: the predictions of round 0 are those of models that have not learned anything, and are not used.
  So is a round without the predictions of anybody else (warm-up, or none came in time): the own ones teach nothing.

A peer publishes its logits on the transfer set; its model stays with it. ``method.temperature`` and
``method.distillation_weight`` have no part in this method, nor have the class statistics.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from crad_p2p.distillation import Objective, own_labels
from crad_p2p.methods.interface import Digest, Lesson, Method


def consensus(predictions: Tensor) -> Tensor:
    """The plain mean of all peers' logits, float32 [S, C], from [N, S, C]."""
    return predictions.double().mean(0).float()


class FedMd(Method):
    """Towards the mean logits, then towards the own labels."""

    def objective(self, lesson: Lesson) -> Objective:
        del lesson
        return own_labels

    def digest(self, lesson: Lesson) -> Digest | None:
        if lesson.predictions is None:
            return None
        target = consensus(lesson.predictions)
        return Digest(torch.arange(len(target)), target, F.l1_loss)
