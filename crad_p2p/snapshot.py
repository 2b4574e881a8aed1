"""The snapshot file, as far as it can be checked without torch: size, digest and safetensors header.

A header is compared with the layout that the announced architecture must have before a byte of tensor data is used:
exactly its names, dtypes and shapes, offsets without gap or overlap. ``crad_p2p.weights`` checks the values.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from crad_p2p.foreign import printable, unique_keys

#: Files of a round in its directory.
SNAPSHOT_FILE = "snapshot.safetensors"
CHECKPOINT_FILE = "checkpoint.safetensors"

#: Enough for several thousand tensors; the safetensors library itself would accept 100 MB.
MAX_HEADER_BYTES = 1 << 20
_ITEM_BYTES = {"U8": 1, "F32": 4, "I64": 8}


class SnapshotError(Exception):
    """A snapshot that must not be used, and why."""


class DamagedFileError(SnapshotError):
    """A file that is not what its manifest announces: cut or changed on the way, so another transfer may heal it."""


class TensorSpec(NamedTuple):
    """dtype in safetensors' words (``U8``, ``F32``, ``I64``) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)


Layout = dict[str, TensorSpec]


def file_bounds(layout: Layout) -> tuple[int, int]:
    """Least and most bytes of a snapshot file of this layout: its data are exact, only its header may vary."""
    data = sum(spec.nbytes for spec in layout.values())
    return 8 + len("{}") + data, 8 + MAX_HEADER_BYTES + data


def file_bytes(layout: Layout) -> int:
    """Bytes of the file that :func:`crad_p2p.weights.encode` makes of such tensors."""
    return 8 + header_bytes(layout) + sum(spec.nbytes for spec in layout.values())


def header_bytes(layout: Layout) -> int:
    """Bytes of the header in that file, which must be at most :data:`MAX_HEADER_BYTES`."""
    header, end = dict[str, Any](), 0
    for name, spec in sorted(layout.items(), key=lambda item: (-_ITEM_BYTES[item[1].dtype], item[0])):
        offsets = [end, end + spec.nbytes]
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        end = offsets[1]
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return -(-length // 8) * 8


def layout_to_json(layout: Layout) -> dict[str, Any]:
    return {name: [spec.dtype, list(spec.shape)] for name, spec in layout.items()}


def layout_from_json(document: dict[str, Any]) -> Layout:
    return {name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in document.items()}


def sha256_file(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: Path, layout: Layout, *, size: int, sha256: str) -> None:
    """Check size, header and digest.

    Raises:
        DamagedFileError: size or digest are not the manifest's.
        SnapshotError: they are, and the header is not the architecture's. Both name what was expected and found.
    """
    found = path.stat().st_size
    if found != size:
        raise DamagedFileError(f"file has {found} bytes, the manifest says {size}")
    digest = sha256_file(path)
    if digest != sha256:
        raise DamagedFileError(f"sha256 of the file is {digest[:12]}…, the manifest says {sha256[:12]}…")
    if not check_start(path, layout, size=size):
        raise SnapshotError(f"a file of {size} bytes, which is too short for its safetensors header")


def check_start(path: Path, layout: Layout, *, size: int) -> bool:
    """Check the header of a file that may still be on its way; whether all of the header is there.

    Args:
        size: bytes of the whole file.

    Raises:
        SnapshotError: the header is not the architecture's.
    """
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return False
        (length,) = struct.unpack("<Q", start)
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise SnapshotError(f"safetensors header claims {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        header = file.read(length)
    if len(header) < length:
        return False
    check_header(header, layout, data_bytes=size - 8 - length)
    return True


def check_header(header: bytes, layout: Layout, *, data_bytes: int) -> None:
    """Compare a safetensors header (JSON) with the layout.

    Raises:
        SnapshotError: not JSON, a key twice, a tensor too many, missing or different, or offsets with a gap or overlap.
    """
    try:
        entries = json.loads(header.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"safetensors header is not valid: {printable(str(error))}") from None
    if not isinstance(entries, dict):
        raise SnapshotError("safetensors header is not a JSON object")
    _check_names(entries, layout)
    spans = []
    for name, spec in layout.items():
        entry = entries[name]
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise SnapshotError(f"tensor '{name}' must have exactly dtype, shape and data_offsets")
        # As text, since True and 1.0 equal 1.
        if str([entry["dtype"], entry["shape"]]) != str([spec.dtype, list(spec.shape)]):
            found = printable(f"{entry['dtype']} {entry['shape']}")
            raise SnapshotError(f"tensor '{name}' must be {spec.dtype} {list(spec.shape)}, found {found}")
        spans.append((entry["data_offsets"], spec.nbytes, name))
    if not all(isinstance(s, list) and len(s) == 2 and all(type(x) is int for x in s) for s, _, _ in spans):
        raise SnapshotError("data_offsets must be two integers")
    end = 0
    for (start, stop), nbytes, name in sorted(spans):
        if start != end or stop - start != nbytes:
            found = printable(f"{start} to {stop}")
            raise SnapshotError(f"tensor '{name}' lies at bytes {found}; expected {end} to {end + nbytes}")
        end = stop
    if end != data_bytes:
        raise SnapshotError(f"the tensors take {end} bytes, the file has {data_bytes} behind its header")


def _check_names(entries: dict[str, Any], layout: Layout) -> None:
    extra, missing = sorted(entries.keys() - layout.keys()), sorted(layout.keys() - entries.keys())
    for word, names in (("an unexpected", extra), ("no", missing)):
        if names:
            raise SnapshotError(
                f"snapshot has {word} tensor '{printable(names[0])}'; its architecture has {len(layout)} tensors"
            )
