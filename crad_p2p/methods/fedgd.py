"""FedGD in the CRAD paper's sense: a synthetic transfer set, as TARGET (Zhang et al., ICCV 2023) makes one.

The CRAD paper cites TARGET under this name; another method is really called FedGD (Zhang, Guo et al., IEEE TC 72(10)),
and is not what is built here. TARGET is for classes that come one after another, and has a server, against whose global
model a generator is trained (``crad_p2p.synthesis``). Its official code's:

* the generator, and its loss 10 L_BN + 0.5 CE. The code has a third, adversarial term, and a student at the server; by
  its configuration for CIFAR-100 neither ever runs;
* clients learn from private images, with their labels, and from synthetic ones, a batch of each in every step.

Ours, among peers without a server:

* there is no global model. In round ``fedgd.first``, and every ``fedgd.every`` rounds from then on, each peer trains a
  generator against its *own* model, and publishes its part of the images. All parts, in the order of the ids, are the
  transfer set of all; the next time they are replaced;
* then predictions are exchanged, as in ``fedmd``: in the round after that with the images each peer publishes its
  logits on them, and in the one after that all learn from these;
* what is learned are soft targets, the mean of softmax(z / T) over all peers, oneself included, summed in float64 in
  the order of the ids; T is ``method.temperature``;
* the loss is CE(own images) + mu T^2 KL(target || softmax(z / T)) on as many synthetic images (all of them, if those
  are fewer), with mu = ``fedgd.weight`` of 1. The source has 25 KL at T = 2 without the square, for a student that
  would forget classes otherwise;
* synthetic images are not augmented: the others spoke of them as they are;
* which images are in a step is drawn anew for every round: one permutation of all after the other;
* rounds in which nobody's predictions came are private: all before the first images, and each one after new ones.

The model stays with its peer. Beside images, and before there are any, a peer publishes the sha256 of it, from which
nobody can learn anything. ``method.distillation_weight`` has no part in this method, nor have the class statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crad_p2p.distillation import Objective, own_labels, soft_loss
from crad_p2p.federation import FedGdSettings
from crad_p2p.methods.interface import Digest, Lesson, Method


def mean_posterior(predictions: Tensor, temperature: float) -> Tensor:
    """The mean of softmax(z / T) over all peers, float32 [S, C], from logits [N, S, C]."""
    return torch.softmax(predictions.double() / temperature, -1).mean(0).float()


class FedGd(Method):
    """Towards the mean posterior on synthetic images, beside the own labels."""

    def objective(self, lesson: Lesson) -> Objective:
        del lesson
        return own_labels

    def digest(self, lesson: Lesson) -> Digest | None:
        if lesson.predictions is None:
            return None
        own = self._settings.fedgd or FedGdSettings()
        targets, temperature = mean_posterior(lesson.predictions, self.temperature), self.temperature
        places = torch.arange(len(targets)) if lesson.places is None else lesson.places

        def loss(logits: Tensor, target: Tensor) -> Tensor:
            return own.weight * soft_loss(logits, target, temperature)

        return Digest(places, targets[places], loss, is_beside=True)
