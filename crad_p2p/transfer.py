"""What peers publish whose models stay with them, and the images that it is about.

Predictions are of images that all have. Where the peers have made these themselves, the sha256 of all of them goes with
the predictions: those of other images have the same shape, and mean nothing here. And in rounds without predictions the
sha256 of the model is published: so a peer can tell whether the model in its checkpoint is the one of that round, as it
can by predictions, and no two rounds have the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crad_p2p import weights
from crad_p2p.snapshot import Layout, SnapshotError

#: The name of a tensor beside predictions.
TRANSFER_DIGEST = "transfer_digest"

_DTYPES = {"U8": torch.uint8, "F32": torch.float32, "I64": torch.int64}
#: By how much what a model says of the transfer set may differ from what was published of it, relative to the largest
#: logit: another device rounds otherwise, and nothing else may be different.
_SAME = 0.02


def digest_of_model(state: Mapping[str, Tensor]) -> Tensor:
    """sha256 of a model's tensors, uint8 [32]."""
    return _as_tensor(hashlib.sha256(weights.encode(dict(state))))


def digest_of_images(images: NDArray[np.uint8]) -> Tensor:
    """sha256 of a transfer set [S, C, H, W], uint8 [32]."""
    return _as_tensor(hashlib.sha256(str(images.shape).encode() + np.ascontiguousarray(images).tobytes()))


def union(parts: Sequence[tuple[Tensor | None, int]], image_shape: Sequence[int]) -> NDArray[np.uint8]:
    """The transfer set of all peers, uint8 [S, C, H, W].

    Args:
        parts: of every peer, in id order, its images [n, C, H, W] and n. Black ones stand for those that did not come,
            so that all others keep their places.
    """
    return np.concatenate(
        [np.zeros((count, *image_shape), np.uint8) if part is None else part.numpy() for part, count in parts]
    )


def places_there(images: NDArray[np.uint8]) -> Tensor:
    """Which images of a transfer set are there: int64 [K], ascending. One that is all black is not."""
    return torch.from_numpy(np.flatnonzero(images.reshape(len(images), -1).any(1)))


def tensors_in(snapshot: bytes, *layouts: Layout) -> dict[str, Tensor]:
    """The tensors of a snapshot that has one of these layouts.

    Raises:
        SnapshotError: it has none of them, or values that cannot be.
    """
    tensors = weights.decode(snapshot)
    found = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    if not any(found == {n: (_DTYPES[spec.dtype], spec.shape) for n, spec in each.items()} for each in layouts):
        expected = " or ".join(map(_in_words, layouts))
        raise SnapshotError(f"it does not hold {expected}")
    weights.check_values(tensors)
    return tensors


def require_same(found: Tensor, published: Tensor) -> None:
    """See that a model is the one whose predictions were published.

    Raises:
        SnapshotError: it is another one.
    """
    if not bool(((found - published).abs() <= _SAME * (1 + published.abs().amax())).all()):
        raise SnapshotError("the model in its checkpoint does not say what was published as its predictions")


def require_equal(found: Tensor, published: Tensor, what: str) -> None:
    """See that two digests are the same.

    Args:
        what: of what they are, for the error.

    Raises:
        SnapshotError: they are not.
    """
    if not torch.equal(found, published):
        raise SnapshotError(f"{what} has sha256 {_in_hex(found)}…, and {_in_hex(published)}… was published")


def _in_words(layout: Layout) -> str:
    names = " and ".join(f"'{name}'" for name in layout)
    kinds = ", ".join(f"{_DTYPES[spec.dtype]} {list(spec.shape)}".removeprefix("torch.") for spec in layout.values())
    return f"{names} alone, {kinds}"


def _as_tensor(digest: hashlib._Hash) -> Tensor:
    return torch.from_numpy(np.frombuffer(digest.digest(), np.uint8).copy())


def _in_hex(digest: Tensor) -> str:
    return bytes(digest.tolist()).hex()[:12]
