"""Uncertainty KD: teachers count by how sure they are, sample by sample.

The paper says that it "weights teachers by the negative entropy of their predictions", and gives no formula. Ours: with
H_j(x) the entropy (natural logarithm) of teacher j's posterior at temperature T, the weights are the softmax over the
teachers of -H_j(x), the same for all classes; the target is the weighted mean. No filter; the class statistics play no
part. The loss is the paper's (Eq. 9).
"""

from __future__ import annotations

import torch
from torch import Tensor


def uncertainty_weights(q: Tensor) -> Tensor:
    """[J, B, 1], which sum to 1 over the teachers, from posteriors [J, B, C].

    A confident teacher weighs more; dividing -H by its (negative) sum, as is easily written, does the reverse.
    """
    entropy = torch.special.entr(q).sum(-1, keepdim=True)
    return torch.softmax(-entropy, dim=0)
