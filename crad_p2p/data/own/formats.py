"""One file, or one array, as an image: PNG, JPEG and TIFF by Pillow, DICOM by pydicom.

What a file is, its first bytes say, and not its name. A file with several pages, frames or pictures is refused: which
of them is meant, nobody could tell.
"""

from __future__ import annotations

import hashlib
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from crad_p2p.data.own.dicom import render_dicom
from crad_p2p.data.own.rendering import Rendering, UnreadableError, full_range

#: Pixels of one picture. More is a whole slide, or a small file that would fill the memory (a decompression bomb).
MAX_PIXELS = 89_478_485
#: Bytes of one file.
MAX_BYTES = 1 << 30

_FORMATS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"II*\0": "TIFF", b"MM\0*": "TIFF"}
_FORMATS |= {b"II+\0": "TIFF", b"MM\0+": "TIFF"}  # BigTIFF
_DICOM_OFFSET = 128
_GREY, _DEEP_GREY = ("1", "L", "LA", "La"), ("I;16", "I;16L", "I;16B", "I;16N")
#: Pillow makes 8 bits of colour of 16, by leaving the lower byte out. Asked for the other order of bytes, it leaves the
#: upper one out.
_NATIVE = "L" if sys.byteorder == "little" else "B"
_OTHER_ORDER = {"B": "L", "L": "B", "N": "B" if _NATIVE == "L" else "L"}

_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_WHITE_IS_ZERO = 0

# What is wrong with a picture is said here, with its name.
warnings.filterwarnings("ignore", module=r"PIL\.")


def render_file(path: Path, rendering: Rendering) -> tuple[str, NDArray[np.uint8]]:
    """Read an image file.

    Returns:
        sha256 (hex) of the file's bytes, and the image, uint8 [C, S, S].

    Raises:
        UnreadableError: it is no image, or one that cannot be used.
        OSError: the file cannot be read, which another try may mend.
    """
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UnreadableError(f"has {size} bytes, and at most {MAX_BYTES} are read")
    content = path.read_bytes()
    return hashlib.sha256(content).hexdigest(), _guarded(lambda: _render(content, rendering))


def render_array(array: NDArray[Any], rendering: Rendering) -> tuple[str, NDArray[np.uint8]]:
    """The same of an image as numbers: uint8 or uint16 [H, W] or [H, W, 1 or 3]."""
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    values = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    if array.dtype == np.uint8:
        return digest.hexdigest(), rendering.of_bytes(Image.fromarray(np.ascontiguousarray(values)))
    return digest.hexdigest(), rendering.of_values(values, rendering.window or full_range(16))


def require_pixels(width: int, height: int) -> None:
    """See that a picture is not too large, before it is unpacked.

    Raises:
        UnreadableError: it is.
    """
    if width * height > MAX_PIXELS:
        raise UnreadableError(
            f"has {width}x{height} pixels, and at most {MAX_PIXELS} are unpacked (a decompression bomb, or a whole "
            f"slide: cut it into tiles)"
        )


def _guarded(render: Callable[[], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """What a damaged file makes a decoder raise can be almost anything."""
    try:
        return render()
    except (UnreadableError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise UnreadableError(f"has more than {MAX_PIXELS} pixels (a decompression bomb)") from None
    except UnidentifiedImageError:
        raise UnreadableError("is damaged: its beginning is that of an image, and the rest is not") from None
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise UnreadableError(f"is damaged or cut off ({lines[0].strip().rstrip('.')})") from None


def _render(content: bytes, rendering: Rendering) -> NDArray[np.uint8]:
    if not content:
        raise UnreadableError("is empty, 0 bytes")
    if content[_DICOM_OFFSET : _DICOM_OFFSET + 4] == b"DICM":
        return render_dicom(content, rendering, require_pixels)
    kind = next((kind for magic, kind in _FORMATS.items() if content.startswith(magic)), None)
    if kind is None:
        raise UnreadableError("is no PNG, JPEG, TIFF or DICOM file")
    with Image.open(io.BytesIO(content), formats=[kind]) as picture:
        require_pixels(*picture.size)
        # Of a JPEG with further pictures (MPO, as cameras make them) the first is the picture, the others belong to it.
        if picture.format != "MPO" and (pages := getattr(picture, "n_frames", 1)) > 1:
            what = "pages" if kind == "TIFF" else "frames"
            raise UnreadableError(f"has {pages} {what}, and which is the image is not known: save that one alone")
        if deep := _deep_values(picture, content, kind, rendering):
            return rendering.of_values(*deep)
        if picture.mode in ("I", "F", *_DEEP_GREY):
            raise UnreadableError(f"holds numbers of another kind than 8 or 16 bits (mode {picture.mode})")
        picture.load()
        upright = ImageOps.exif_transpose(picture)
        return rendering.of_bytes(upright.convert("L" if upright.mode in _GREY else "RGB"))


def _deep_values(
    picture: ImageFile.ImageFile, content: bytes, kind: str, rendering: Rendering
) -> tuple[NDArray[Any], tuple[float, float]] | None:
    """Of a picture with more than 8 bits: its values [H, W] or [H, W, 3], and the window; None if it has no more."""
    if kind == "PNG":
        bits, is_signed, is_inverted = content[24], False, False
    elif kind == "TIFF":
        tags = picture.tag_v2  # type: ignore[attr-defined]  # of a TIFF it is there
        depths = {*tags.get(_BITS_PER_SAMPLE, (1,))}
        bits, is_signed = max(depths), 2 in tags.get(_SAMPLE_FORMAT, (1,))
        is_inverted = tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO  # which Pillow sees to for 8 bits alone
        if 3 in tags.get(_SAMPLE_FORMAT, (1,)):
            return None  # floating point
    else:
        return None
    if not 8 < bits <= 16:
        return None
    window = rendering.window or full_range(bits, is_signed=is_signed)
    if picture.mode in (*_DEEP_GREY, "I"):
        values = np.asarray(picture).astype(np.int32)
        return (sum(window) - values if is_inverted else values), window
    return _deep_colour(picture, content, kind), window


def _deep_colour(picture: ImageFile.ImageFile, content: bytes, kind: str) -> NDArray[np.int32]:
    """Values of a picture of 16 bits that Pillow takes for one of 8: read twice, for the upper and the lower byte."""
    with Image.open(io.BytesIO(content), formats=[kind]) as lower:
        lower.tile = [tile._replace(args=_in_other_order(tile.args)) for tile in lower.tile]
        low = np.asarray(lower).astype(np.int32)
    values = np.asarray(picture).astype(np.int32) * 256 + low
    return values[..., :3]  # without alpha


def _in_other_order(arguments: Any) -> Any:
    mode, *others = (arguments,) if isinstance(arguments, str) else arguments
    if mode not in [f"{colours};16{order}" for colours in ("RGB", "RGBA", "RGBX") for order in _OTHER_ORDER]:
        raise UnreadableError(
            f"has 16 bits in a form that cannot be read ({mode}): save it as PNG without transparency"
        )
    mode = mode[:-1] + _OTHER_ORDER[mode[-1]]
    return mode if isinstance(arguments, str) else (mode, *others)
