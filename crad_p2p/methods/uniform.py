"""Uniform KD: the target is the mean of all teachers' posteriors.

The paper's, Eq. 3, with its loss (Eq. 9). No filter; the class statistics that peers publish play no part.
"""

from __future__ import annotations

from torch import Tensor


def uniform_mean(q: Tensor) -> Tensor:
    """[B, C] from posteriors [J, B, C]."""
    return q.mean(0)
