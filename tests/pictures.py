"""Image files of every kind, made by hand where Pillow cannot write them."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

#: Sides of a picture unless a test wants another one: no square, and larger than what is made of it.
WIDTH, HEIGHT = 13, 10


def pixels(seed: int, *shape: int, dtype: Any = np.uint8, below: int | None = None) -> np.ndarray:
    """Random numbers of a shape, by default [HEIGHT, WIDTH, 3]."""
    most = np.iinfo(dtype).max + 1 if below is None else below
    return np.random.default_rng(seed).integers(0, most, shape or (HEIGHT, WIDTH, 3), dtype=dtype)


def save(path: Path, array: np.ndarray, **options: Any) -> Path:
    """As a file of the format that the name says, with all folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return path


def png16(array: np.ndarray) -> bytes:
    """A PNG of 16 bits: [H, W, 3] RGB, [H, W, 4] RGBA, [H, W, 2] grey with alpha."""
    height, width, channels = array.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    return png(width, height, 16, {2: 4, 3: 2, 4: 6}[channels], rows)


def png(width: int, height: int, bits: int, kind: int, rows: bytes) -> bytes:
    """A PNG, whether or not its rows are what it says."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def tiff16(array: np.ndarray, *, order: str = "<", compressed: bool = False, white_is_zero: bool = False) -> bytes:
    """A TIFF of 16 bits in one strip: [H, W] grey, [H, W, 3] RGB; int16 is signed."""
    height, width = array.shape[:2]
    samples = 1 if array.ndim == 2 else array.shape[2]
    signed = array.dtype == np.int16
    data = array.astype(f"{order}{'i' if signed else 'u'}2").tobytes()
    data = zlib.compress(data) if compressed else data
    short, long = 3, 4
    entries = [
        (256, short, 1, width),
        (257, short, 1, height),
        (258, short, samples, 16),
        (259, short, 1, 8 if compressed else 1),
        (262, short, 1, 2 if samples > 1 else 0 if white_is_zero else 1),
        (273, long, 1, None),
        (277, short, 1, samples),
        (278, short, 1, height),
        (279, long, 1, len(data)),
        (339, short, samples, 2 if signed else 1),
    ]
    lists = 8 + 2 + 12 * len(entries) + 4  # where values lie that do not fit into an entry
    outside, directory = b"", b""
    for tag, kind, count, value in entries:
        head = struct.pack(order + "HHI", tag, kind, count)
        if kind == short and count > 2:
            directory += head + struct.pack(order + "I", lists + len(outside))
            outside += struct.pack(order + "H", value) * count
        elif kind == short:
            directory += head + struct.pack(order + "HH", value, 0)
        else:
            offset = lists + 2 * 2 * max(samples, 1) if value is None else value
            directory += head + struct.pack(order + "I", offset)
    outside = outside.ljust(2 * 2 * max(samples, 1), b"\0")
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    return start + struct.pack(order + "H", len(entries)) + directory + struct.pack(order + "I", 0) + outside + data


def dicom(array: np.ndarray, **fields: Any) -> bytes:
    """A DICOM file: [H, W] MONOCHROME2 or [H, W, 3] RGB unless a field says otherwise."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage

    header = Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header.file_meta.MediaStorageSOPClassUID = header.SOPClassUID = SecondaryCaptureImageStorage
    header.file_meta.MediaStorageSOPInstanceUID = header.SOPInstanceUID = "1.2.3"
    header.Rows, header.Columns = array.shape[:2]
    header.SamplesPerPixel = 1 if array.ndim == 2 else 3
    header.PhotometricInterpretation = "MONOCHROME2" if array.ndim == 2 else "RGB"
    if array.ndim == 3:
        header.PlanarConfiguration = 0
    bits = 8 * array.dtype.itemsize
    header.BitsAllocated = header.BitsStored = bits
    header.HighBit = bits - 1
    header.PixelRepresentation = int(array.dtype.kind == "i")
    header.PixelData = array.tobytes() + b"\0" * (array.nbytes % 2)
    for name, value in fields.items():
        setattr(header, name, value)
    file = io.BytesIO()
    header.save_as(file, enforce_file_format=True)
    return file.getvalue()
