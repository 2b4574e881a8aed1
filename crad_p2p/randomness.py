"""Every random draw of the project comes from here; the global generators are never used."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the service draws, too, and does without numpy
    import numpy as np


def _derive(seed: int, purpose: str, peer: int | None, round_number: int | None) -> int:
    text = f"{seed}/{'-' if peer is None else peer}/{'-' if round_number is None else round_number}/{purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


def generator(
    seed: int, purpose: str, *, peer: int | None = None, round_number: int | None = None
) -> np.random.Generator:
    """A generator that depends on (federation seed, peer id, round, purpose) and on nothing else.

    ``peer`` is None for draws that all peers share, such as the partition.
    """
    import numpy as np

    return np.random.Generator(np.random.PCG64(_derive(seed, purpose, peer, round_number)))


def torch_seed(seed: int, purpose: str, *, peer: int | None = None, round_number: int | None = None) -> int:
    """The same derivation as a 63-bit seed for a ``torch.Generator``."""
    return _derive(seed, purpose, peer, round_number) >> 65


def drawn_number(seed: int, purpose: str, *, peer: int | None = None, round_number: int | None = None) -> int:
    """The same derivation as one number, of 128 bits, where a generator would be used once."""
    return _derive(seed, purpose, peer, round_number)
