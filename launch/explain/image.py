"""The image that is asked about: one of the common test set, by number, or a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crad_p2p.data.datasets import Dataset
from crad_p2p.errors import DataError, UsageError
from crad_p2p.foreign import printable

#: Pillow's names for images of one and of three channels.
_MODES = {1: ("L", "grey"), 3: ("RGB", "RGB")}


@dataclass(frozen=True, eq=False)
class Picture:
    """
    Attributes:
        pixels: uint8 [C, H, W].
        truth: its label; None for a file.
        number: in the test set; None for a file.
    """

    name: str
    pixels: NDArray[np.uint8]
    truth: int | None = None
    number: int | None = None


def find_image(word: str, dataset: Dataset) -> Picture:
    """The image that a number or the path of a file names.

    Raises:
        UsageError: no image has this number, there is no such file, or Pillow is missing.
        DataError: the file is no image like those of the data set.
    """
    if word.isdecimal():
        return _numbered(int(word), dataset)
    return Picture(printable(Path(word).name), _read(Path(word), dataset.test.images.shape[1:]))


def _numbered(number: int, dataset: Dataset) -> Picture:
    count = len(dataset.test)
    if number >= count:
        raise UsageError(
            f"image {number}: the test set of {dataset.name} has {count} images; give a number from 0 to {count - 1}, "
            f"or a PNG or JPEG file"
        )
    name = f"Image {number} of the test set"
    return Picture(name, dataset.test.images[number], int(dataset.test.labels[number]), number)


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Uint8 [C, H, W] of that shape."""
    channels, height, width = shape
    mode, colours = _MODES[channels]
    if not path.is_file():
        raise UsageError(
            f"image {path}: is no number and no file; give the number of a test image, or a PNG or JPEG file"
        )
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(f"image {path}: to read it Pillow is needed, which is missing: pip install Pillow") from None
    wanted = f"expected {width}x{height} pixels, {colours}"
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            if (image.size, image.mode) != ((width, height), mode):  # looked at before anything is decoded
                raise DataError(
                    f"image {path}: has {image.width}x{image.height} pixels, mode {image.mode}; {wanted} (mode "
                    f"{mode}), as all images of the data set: convert it"
                )
            pixels = np.array(image, dtype=np.uint8).reshape(height, width, channels)
    except (OSError, SyntaxError, ValueError) as error:
        words = printable(str(error).splitlines()[0] if str(error) else type(error).__name__, 200)
        raise DataError(f"image {path}: cannot be read ({words}); {wanted}, as PNG or JPEG") from None
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
