"""The methods' names, and what the service must know of each. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Traits(NamedTuple):
    """What a method asks of the service and the client.

    Attributes:
        has_teachers: peers learn from one another.
        has_target: what the teachers say of an image becomes one target, by ``Method.combination``.
        has_memory: the student's own model, as it is when a round begins, teaches it too.
        has_peak: what a peer keeps beside its model (``Method.state``) is an earlier one of its own, or nothing yet; it
            is evaluated too.
        publishes_cross_entropy: the class statistics have the mean cross-entropy of every class.
        publishes_predictions: a peer publishes what its model says of the transfer set in the model's place, which
            stays in its checkpoints.
        makes_transfer_set: they make the transfer set themselves, in some of the rounds.
    """

    has_teachers: bool = True
    has_target: bool = True
    has_memory: bool = False
    has_peak: bool = False
    publishes_cross_entropy: bool = False
    publishes_predictions: bool = False
    makes_transfer_set: bool = False

    @property
    def untaught_rounds(self) -> int:
        """First rounds without teachers, whatever the settings: predictions of models that have not learned yet are
        noise.
        """
        return 1 if self.publishes_predictions else 0


#: In the order of the documentation.
METHODS: Mapping[str, Traits] = {
    "crad": Traits(),
    "stage1": Traits(),
    "uniform": Traits(),
    "uncertainty": Traits(),
    "acc": Traits(),
    "sup": Traits(),
    "sm": Traits(),
    "lcb": Traits(),
    "ce": Traits(publishes_cross_entropy=True),
    "inv_sigma": Traits(),
    "precision": Traits(),
    "fedmkd": Traits(has_memory=True),
    "dfml": Traits(has_target=False, has_peak=True),
    "fedmd": Traits(has_target=False, publishes_predictions=True),
    "msfkd": Traits(has_target=False, publishes_predictions=True),
    "fedgd": Traits(has_target=False, publishes_predictions=True, makes_transfer_set=True),
    "local": Traits(has_teachers=False, has_target=False),
}
