"""DICOM, by way of pydicom, which is an extra: ``pip install "crad-p2p[dicom]"``."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crad_p2p.data.own.rendering import Rendering, UnreadableError, full_range

_GREY, _COLOUR = ("MONOCHROME1", "MONOCHROME2"), ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
_PALETTE = "PALETTE COLOR"


@functools.cache
def version() -> str | None:
    """Of pydicom; None if it is not installed."""
    if importlib.util.find_spec("pydicom") is None:
        return None
    try:
        return importlib.metadata.version("pydicom")
    except importlib.metadata.PackageNotFoundError:  # it was put there by hand
        return "unknown"


def render_dicom(content: bytes, rendering: Rendering, require_pixels: Callable[[int, int], None]) -> NDArray[np.uint8]:
    """Read a DICOM file of one frame.

    Grey values of more than 8 bits are cut to the window that the file gives (VOI LUT), else to that of the rendering,
    else to all that its bits can hold. MONOCHROME1 is inverted, so that bright is bright.

    Args:
        require_pixels: raises UnreadableError for a width and height that are too much.

    Returns:
        uint8 [C, S, S].

    Raises:
        UnreadableError: it cannot be used.
    """
    try:
        import pydicom
        from pydicom.pixels.processing import apply_color_lut
        from pydicom.pixels.utils import pixel_array
    except ImportError:
        raise UnreadableError(
            'is a DICOM file, and pydicom, which reads them, is not installed: pip install "crad-p2p[dicom]"'
        ) from None
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)  # what is wrong is said here, once
    header = pydicom.dcmread(io.BytesIO(content))
    if "PixelData" not in header:
        raise UnreadableError("is a DICOM file without an image")
    if (frames := int(header.get("NumberOfFrames") or 1)) > 1:
        raise UnreadableError(f"has {frames} frames, and which is the image is not known: save that one alone")
    if header.BitsAllocated not in (8, 16):
        raise UnreadableError(f"has {header.BitsAllocated} bits a sample, and 8 and 16 can be read")
    require_pixels(int(header.Columns), int(header.Rows))
    kind = str(header.PhotometricInterpretation)
    if kind not in (*_GREY, *_COLOUR, _PALETTE):
        raise UnreadableError(f"has colours of the kind {kind}, which cannot be read")
    stored = pixel_array(header)
    bits = int(header.BitsStored)
    if kind == _PALETTE:
        colours = apply_color_lut(stored, header)
        return rendering.of_values(colours[..., :3], full_range(8 * colours.dtype.itemsize))
    if kind in _COLOUR:
        deep = None if bits <= 8 else rendering.window
        return rendering.of_values(stored, deep or full_range(bits))
    values, window = _grey(header, stored, bits, rendering)
    if kind == "MONOCHROME1":
        values = sum(window) - values
    return rendering.of_values(values, window)


def _grey(
    header: Any, stored: NDArray[Any], bits: int, rendering: Rendering
) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """Values after the modality's and the window's curve, and which of them are black and white."""
    from pydicom.pixels.processing import apply_modality_lut, apply_voi

    values = apply_modality_lut(stored, header).astype(np.float64)
    if header.get("VOILUTSequence"):
        table = header.VOILUTSequence[0]
        looked_up = apply_voi(apply_modality_lut(stored, header), header)
        return looked_up.astype(np.float64), full_range(int(table.LUTDescriptor[2]))
    if header.get("WindowCenter") is not None and header.get("WindowWidth") is not None:
        width = float(_first(header.WindowWidth))
        curve = str(header.get("VOILUTFunction") or "LINEAR")
        if width <= 0 or (curve == "LINEAR" and width < 1):
            raise UnreadableError(f"has a window of width {width:g}")
        if curve == "SIGMOID":
            centre = float(_first(header.WindowCenter))
            return 1 / (1 + np.exp(-4 * (values - centre) / width)), (0.0, 1.0)
        return values, _linear(float(_first(header.WindowCenter)), width, is_exact=curve == "LINEAR_EXACT")
    if rendering.window is not None and bits > 8:
        return values, rendering.window
    ends = np.array(full_range(bits, is_signed=bool(header.PixelRepresentation)))
    if header.get("ModalityLUTSequence"):
        return values, full_range(int(header.ModalityLUTSequence[0].LUTDescriptor[2]))
    slope, intercept = float(header.get("RescaleSlope") or 1), float(header.get("RescaleIntercept") or 0)
    low, high = sorted((ends * slope + intercept).tolist())
    return values, (low, high)


def _linear(centre: float, width: float, *, is_exact: bool) -> tuple[float, float]:
    """What becomes black and white (DICOM PS3.3, C.11.2.1.2)."""
    if is_exact:
        return centre - width / 2, centre + width / 2
    half = max(width - 1, 1e-6) / 2
    return centre - 0.5 - half, centre - 0.5 + half


def _first(value: Any) -> Any:
    """Of several windows the first, which is the one to begin with."""
    return value[0] if hasattr(value, "__len__") and not isinstance(value, str) else value
