"""MSFKD-style: selective federated distillation, after the title alone of Wang, Zhang, Tao, Chen, IEEE JSTSP 17(1).

Neither code nor text of the source could be read. Known are its title, which speaks of knowledge selection, of the
optimisation of local updating and of heterogeneous models, and that the CRAD paper calls it "a multi-teacher selective
federated distillation method" with a proxy set. So *all formulas here are ours*:

* what is exchanged are logits z on a transfer set, which is that of ``fedmd`` (see there), as are the order of the two
  epochs, the optimiser, and the rounds that are private;
* of each image, a peer j is *kept* if its confidence, the largest entry of softmax(z_j), is not below the
  ``msfkd.keep_quantile`` of all confidences (0.5: their median, the mean of the middle two of an even number), *and* it
  says what the plurality says, the one class that more peers say than any other. Confidences are at T = 1;
* the target of the image is the mean of softmax(z_j / T) over those kept, T being ``method.temperature``;
* an image on which several classes are named equally often, such as all different ones, has no plurality and is dropped
  for the round; so is one where all of the plurality are below the quantile. ``msfkd.require_plurality: false`` asks
  for the confidence alone, and drops nothing;
* all peers count, the student too, as in a server's aggregate: so all have the same target;
* the student learns T^2 KL(target || softmax(z / T)) for an epoch over the images that are left, then one epoch of
  cross-entropy on its own images. What the title calls local updating stays at one epoch each, as for all methods.

A peer publishes its logits on the transfer set; its model stays with it. ``method.distillation_weight`` has no part in
this method, nor have the class statistics.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from crad_p2p.distillation import Objective, own_labels, soft_loss
from crad_p2p.federation import MsfkdSettings
from crad_p2p.methods.interface import Digest, Lesson, Method


def select(predictions: Tensor, *, keep_quantile: float = 0.5, require_plurality: bool = True) -> Tensor:
    """Whose word counts on which image, bool [N, S].

    Args:
        predictions: logits [N, S, C].
    """
    confidence = torch.softmax(predictions.double(), -1).amax(-1)
    kept = confidence >= _quantile(confidence, keep_quantile)
    if not require_plurality:
        return kept
    said = F.one_hot(predictions.argmax(-1), predictions.shape[-1])
    votes = said.sum(0)
    is_most = votes == votes.amax(-1, keepdim=True)
    has_plurality = is_most.sum(-1) == 1
    return kept & has_plurality & (said * is_most).any(-1)


def selected_targets(predictions: Tensor, kept: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Images on which anybody is kept, int64 [K], and the mean of softmax(z / T) of those kept, float32 [K, C]."""
    posteriors = torch.softmax(predictions.double() / temperature, -1)
    places = kept.any(0).nonzero()[:, 0]
    weights = kept[:, places, None].double()
    return places, ((weights * posteriors[:, places]).sum(0) / weights.sum(0)).float()


def _quantile(values: Tensor, share: float) -> Tensor:
    """Along the first axis, between two of them by their distance; one of them exactly where it falls on it."""
    ordered = values.sort(0).values
    place = share * (len(values) - 1)
    if abs(place - round(place)) < 1e-9:
        return ordered[round(place)]
    lower = math.floor(place)
    return torch.lerp(ordered[lower], ordered[lower + 1], place - lower)


class Msfkd(Method):
    """Towards those that are sure and agree with most, then towards the own labels."""

    def objective(self, lesson: Lesson) -> Objective:
        del lesson
        return own_labels

    def digest(self, lesson: Lesson) -> Digest | None:
        if lesson.predictions is None:
            return None
        own = self._settings.msfkd or MsfkdSettings()
        kept = select(lesson.predictions, keep_quantile=own.keep_quantile, require_plurality=own.require_plurality)
        places, targets = selected_targets(lesson.predictions, kept, self.temperature)
        return Digest(places, targets, partial(soft_loss, temperature=self.temperature))
