"""Images are read and scaled once, and kept beside the peer's rounds:

    own.images      uint8 [n, C, S, S], nothing else, to be mapped into memory
    own.json        what was read: the key, a digest of each file, why others were refused, and of the first file

They are used again while the key is the same: names, sizes and times of all files, and how they are rendered. The index
is written last, and checked against what it stands beside: a start that was killed, or a bad disk, costs only the
reading.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray

from crad_p2p.data.own import dicom
from crad_p2p.data.own.listing import Item, Listing, Reader, Refused
from crad_p2p.data.own.rendering import Rendering, UnreadableError
from crad_p2p.durable import replacing, write_file

#: Called with images done and images in all.
Progress = Callable[[int, int], None]

logger = logging.getLogger(__name__)

#: Of what is done with a picture; another number makes all caches be read anew.
_VERSION = 1
#: Threads that read at the same time. Pillow and zlib let others run meanwhile.
_MOST_THREADS = 8
#: Images begun before they are taken, for each thread.
_AHEAD = 4
#: They show patients.
_MODE = 0o600


@dataclass(frozen=True, eq=False)
class Decoded:
    """What could be read of a listing.

    Attributes:
        items: in the order of the images.
        images: uint8 [n, C, S, S], not to be written to.
        digests: sha256 (hex) of the bytes that each was read from.
        refused: in the order of the listing.
        were_kept: they came out of the cache.
    """

    items: tuple[Item, ...]
    images: NDArray[np.uint8]
    digests: tuple[str, ...]
    refused: tuple[Refused, ...]
    were_kept: bool


def decode(
    listing: Listing,
    rendering: Rendering,
    folder: Path,
    name: str,
    *,
    progress: Progress = lambda *_: None,
    look_into: Sequence[Path] = (),
    threads: int | None = None,
) -> Decoded:
    """Read all images of a listing, or find them in the cache.

    Args:
        folder: of the cache; made if it is not there. One process at a time writes to it.
        name: of the files in it: ``own`` or ``test``.
        look_into: folders of other caches, which are read and not written to.
        threads: that read at the same time; by default as many as there are cores, up to 8.

    Raises:
        OSError: the cache cannot be written.
        DataError: an npz file does not hold what it must.
    """
    key = _key(listing, rendering)
    for each in (folder, *look_into):
        if (found := _kept(each, name, key, listing, rendering)) is not None:
            return found
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    digests: list[str | None] = []
    reasons: dict[int, str] = {}
    may_pass = False  # a reason that another try may mend
    whole = hashlib.sha256()
    read = listing.reader(rendering) if listing.items else None
    with replacing(folder / f"{name}.images", _MODE) as file:
        for number, result in enumerate(_in_order(listing.items, read, threads or _threads())):
            if isinstance(result, Exception):
                digests.append(None)
                reasons[number] = _reason(result)
                may_pass = may_pass or isinstance(result, OSError)
            else:
                digest, image = result
                digests.append(digest)
                pixels = image.tobytes()
                whole.update(pixels)
                file.write(pixels)
            progress(number + 1, len(listing.items))
    index = {
        # What could not be reached is tried again at the next start, whatever the times of the files are then.
        "key": None if may_pass else key,
        "sha256": whole.hexdigest(),
        "digests": digests,
        "reasons": reasons,
    }
    write_file(folder / f"{name}.json", json.dumps(index) + "\n", _MODE)
    return _decoded(folder, name, listing, rendering, digests, reasons, were_kept=False)


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_THREADS, max(2, cores))  # one waits for the disk while the other computes


def _in_order(
    items: Sequence[Item], read: Reader | None, threads: int
) -> Iterator[tuple[str, NDArray[np.uint8]] | Exception]:
    """What reading each gives, side by side, with a bounded number of images in memory."""
    if read is None:
        return

    def attempt(item: Item) -> tuple[str, NDArray[np.uint8]] | Exception:
        try:
            return read(item)
        except (UnreadableError, OSError) as error:
            return error

    with ThreadPoolExecutor(threads, thread_name_prefix="image") as pool:
        waiting: deque[Future[tuple[str, NDArray[np.uint8]] | Exception]] = deque()
        for item in items:
            waiting.append(pool.submit(attempt, item))
            if len(waiting) >= threads * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _reason(error: Exception) -> str:
    return f"cannot be read ({error.strerror or error})" if isinstance(error, OSError) else str(error)


def _key(listing: Listing, rendering: Rendering) -> str:
    """sha256 (hex) of all that the images depend on."""
    libraries = {"pillow": PIL.__version__, "pydicom": dicom.version()}
    said: dict[str, Any] = {"version": _VERSION, "place": listing.place, **libraries, **asdict(rendering)}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for item in listing.items:
        digest.update(json.dumps([item.name, *item.stamp]).encode() + b"\n")
    return digest.hexdigest()


def _kept(folder: Path, name: str, key: str, listing: Listing, rendering: Rendering) -> Decoded | None:
    """What is in the cache, if it is of this key and whole."""
    try:
        index = json.loads((folder / f"{name}.json").read_text())
        if index["key"] != key:
            return None
        reasons = {int(number): str(reason) for number, reason in index["reasons"].items()}
        digests = list(index["digests"])
        if len(digests) != len(listing.items) or {n for n, each in enumerate(digests) if each is None} != {*reasons}:
            raise ValueError("its index is damaged")
        found = _decoded(folder, name, listing, rendering, digests, reasons, were_kept=True)
        if hashlib.sha256(found.images.data).hexdigest() != index["sha256"]:
            raise ValueError("its bytes have changed")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be used (%s); all images are read again", folder / f"{name}.images", error)
        return None


def _decoded(
    folder: Path,
    name: str,
    listing: Listing,
    rendering: Rendering,
    digests: Sequence[str | None],
    reasons: Mapping[int, str],
    *,
    were_kept: bool,
) -> Decoded:
    items = tuple(item for item, digest in zip(listing.items, digests, strict=True) if digest is not None)
    shape, path = (len(items), *rendering.shape), folder / f"{name}.images"
    if path.stat().st_size != np.prod(shape):
        raise ValueError(f"it has {path.stat().st_size} bytes, and {np.prod(shape)} are expected")
    # "c": torch wants arrays that it could write to; nobody does, and the file would not change.
    images: NDArray[np.uint8] = np.memmap(path, np.uint8, "c", shape=shape) if items else np.empty(shape, np.uint8)
    return Decoded(
        items,
        images,
        tuple(digest for digest in digests if digest is not None),
        tuple(Refused(item.name, reasons[n]) for n, item in enumerate(listing.items) if n in reasons),
        were_kept,
    )
