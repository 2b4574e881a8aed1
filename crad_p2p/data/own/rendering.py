"""From a picture of any size and depth to the square uint8 image that the models see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

#: Of an RGB pixel that becomes grey: ITU-R 601-2, as Pillow's.
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)


class UnreadableError(Exception):
    """Why one image cannot be used, in half a sentence."""


@dataclass(frozen=True)
class Rendering:
    """How images are made alike, on every site.

    Attributes:
        size: side of the square in pixels. A picture is scaled to it, whatever its shape: its aspect is not kept.
        channels: 1 (colour becomes luma) or 3 (grey is repeated).
        window: values of images deeper than 8 bits that become 0 and 255; None takes all that the depth can hold.
    """

    size: int
    channels: int
    window: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image: channels, height, width."""
        return self.channels, self.size, self.size

    def of_bytes(self, picture: Image.Image) -> NDArray[np.uint8]:
        """Render a picture of 8 bits, of mode ``L`` or ``RGB``.

        Returns:
            uint8 [C, S, S].
        """
        if self.channels == 1:
            picture = picture.convert("L")
        # Where it makes smaller, Pillow's filter is as wide as the pixels that come together: antialiased.
        scaled = np.asarray(picture.resize((self.size, self.size), Image.Resampling.BILINEAR))
        return self._channels_first(scaled if scaled.ndim == 3 else scaled[..., np.newaxis])

    def of_values(self, values: NDArray[np.generic], window: tuple[float, float]) -> NDArray[np.uint8]:
        """Render values of any depth.

        Args:
            values: [H, W] or [H, W, 3].
            window: what becomes 0 and 255; beyond is cut off.

        Returns:
            uint8 [C, S, S].
        """
        low, high = window
        scaled = np.clip((values.astype(np.float32) - low) * np.float32(255 / (high - low)), 0, 255)
        planes = scaled[..., np.newaxis] if scaled.ndim == 2 else scaled
        if self.channels == 1 and planes.shape[-1] == 3:
            planes = (planes @ _LUMA)[..., np.newaxis]
        side = (self.size, self.size)
        small = [
            np.asarray(Image.fromarray(np.ascontiguousarray(planes[..., c])).resize(side, Image.Resampling.BILINEAR))
            for c in range(planes.shape[-1])
        ]
        return self._channels_first(np.clip(np.rint(np.stack(small, axis=-1)), 0, 255).astype(np.uint8))

    def _channels_first(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8 [S, S, 1 or 3] to [C, S, S]."""
        planes = pixels.transpose(2, 0, 1)
        return np.ascontiguousarray(np.broadcast_to(planes, self.shape) if len(planes) == 1 else planes)


def full_range(bits: int, *, is_signed: bool = False) -> tuple[int, int]:
    """Least and largest value of so many bits."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed else (0, (1 << bits) - 1)
