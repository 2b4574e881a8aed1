"""One pass over a shard: order, augmentation and batches, all fixed before the first batch is read.

The learner needs the same augmented batches again and again in a round: once for each teacher, then for the student.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class LocalEpoch:
    """One pass over a shard in the order and augmentation of one round.

    Attributes:
        images: uint8 [n, C, H, W], permuted and augmented.
        labels: int64 [n], in the order of the images.
        batches: ranges of consecutive samples.
        mean, std: float32 [C, 1, 1], in units of the stored pixels (0 to 255).
    """

    images: torch.Tensor
    labels: torch.Tensor
    batches: tuple[slice, ...]
    mean: torch.Tensor
    std: torch.Tensor

    def pixels(self, batch: slice) -> torch.Tensor:
        """The images of a batch, normalised: float32 [B, C, H, W], a new tensor."""
        return self.images[batch].to(torch.float32).sub_(self.mean).div_(self.std)


def draw_epoch(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    *,
    batch_size: int,
    augmentation: str,
    mean: Sequence[float],
    std: Sequence[float],
    generator: np.random.Generator,
    device: torch.device,
) -> LocalEpoch:
    """Permute and augment a shard for one round of training.

    A last batch of one sample is left out if there is another batch, and a shard of one sample has no batch at all:
    batch norm learns nothing from a single image. The number of draws does not depend on ``batch_size``.

    Args:
        images: uint8 [n, C, H, W], the shard.
        labels: int64 [n].
        batch_size: samples per batch; the last batch has what is left.
        augmentation: ``none``; ``crop``, a random window of the image zero-padded by an eighth of its size;
            ``crop_hflip``, that, and mirrored left to right with probability 1/2; ``hvflip``, mirrored along either
            axis with probability 1/2 each.
        mean, std: per channel, of images scaled to [0, 1].
        generator: source of all draws.
        device: where images and labels go.
    """
    order = generator.permutation(len(labels))
    drawn = _augment(images[order], augmentation, generator)
    batches = _batches(len(labels), batch_size)
    if batches and len(labels) - batches[-1].start == 1:
        batches = batches[:-1]
    return _epoch(drawn, labels[order], batches, mean, std, device)


def plain_batches(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    *,
    batch_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
) -> LocalEpoch:
    """All samples in file order, unaugmented, none left out: for validation and test. Arguments as in draw_epoch."""
    return _epoch(images, labels, _batches(len(labels), batch_size), mean, std, device)


def _batches(count: int, batch_size: int) -> tuple[slice, ...]:
    return tuple(slice(start, min(start + batch_size, count)) for start in range(0, count, batch_size))


def _epoch(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    batches: tuple[slice, ...],
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
) -> LocalEpoch:
    def per_channel(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).mul_(255).reshape(-1, 1, 1)

    return LocalEpoch(
        torch.from_numpy(np.ascontiguousarray(images)).to(device),
        torch.from_numpy(np.ascontiguousarray(labels)).to(device),
        batches,
        per_channel(mean),
        per_channel(std),
    )


def _augment(images: NDArray[np.uint8], augmentation: str, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Augment each of the images [n, C, H, W] by draws of its own; may write into ``images``."""
    match augmentation:
        case "none":
            return images
        case "crop":
            return _crop(images, generator)
        case "crop_hflip":
            return _flip(_crop(images, generator), -1, generator)
        case "hvflip":
            return _flip(_flip(images, -1, generator), -2, generator)
        case _:
            raise ValueError(f"unknown augmentation {augmentation!r}")


def _crop(images: NDArray[np.uint8], generator: np.random.Generator) -> NDArray[np.uint8]:
    count, _, height, width = images.shape
    vertical, horizontal = max(1, height // 8), max(1, width // 8)
    top = generator.integers(2 * vertical + 1, size=count)
    left = generator.integers(2 * horizontal + 1, size=count)
    padded = np.pad(images, ((0, 0), (0, 0), (vertical, vertical), (horizontal, horizontal)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))  # a view
    cropped: NDArray[np.uint8] = windows[np.arange(count), :, top, left]
    return cropped


def _flip(images: NDArray[np.uint8], axis: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    chosen = generator.random(len(images)) < 0.5
    images[chosen] = np.flip(images[chosen], axis)
    return images
