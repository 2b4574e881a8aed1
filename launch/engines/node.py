"""What is done on a node of a cluster: look whether it can make runs, and make one.

Arguments and results are plain values and classes of this module, so that any scheduler can carry them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from crad_p2p import __version__
from crad_p2p.errors import ExitCode
from launch.engines.process import start


@dataclass(frozen=True)
class Report:
    """A run is over.

    Attributes:
        node: where it was made.
        code: see :class:`launch.engines.Ended`.
        why: likewise.
        sizes: bytes of the files in its folder, by name, as that node sees them.
    """

    node: str
    code: int
    why: str = ""
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """What a node is like.

    Attributes:
        version: of crad-p2p there.
        token: what stands in the file for which it was to look; None if it does not see it.
        gpu_bytes: memory of the smallest GPU; None if there is none, or it is not known.
    """

    node: str
    version: str
    token: str | None
    gpu_bytes: int | None


def look(file: str) -> Seen:
    """Look around on this node, and for this file."""
    try:
        token = Path(file).read_text()
    except OSError:
        token = None
    return Seen(socket.gethostname(), __version__, token, _gpu_bytes())


def blind(node: str, folder: Path) -> str:
    """What to say of a node that does not see a folder."""
    return (
        f"node {node} does not see {folder}: the folder of a comparison must lie on a filesystem that all nodes share, "
        f"under the same path; choose such an --out"
    )


def make_run(folder: str, arguments: Sequence[str]) -> Report:
    """Make the run of a folder by a process of its own, which ends when this one does, on Linux however that ends.

    Args:
        arguments: see :meth:`launch.engines.Job.arguments`.
    """
    node, own = socket.gethostname(), Path(folder)
    if not own.is_dir():
        return Report(node, ExitCode.CONFIGURATION, blind(node, own))
    process = start(own, arguments)
    try:
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    return Report(node, code, sizes={each.name: each.stat().st_size for each in own.iterdir() if each.is_file()})


class _NoTimeLeftError(BaseException):
    """No Exception, so that nothing on the way takes it for one of its own."""


def make_run_in_time(folder: str, arguments: Sequence[str]) -> Report:
    """:func:`make_run` in a job that gets SIGTERM when it is cancelled, and SIGUSR2 shortly before its time is over."""

    def stop(*_: object) -> None:
        raise _NoTimeLeftError

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, stop)
    try:
        return make_run(folder, arguments)
    except _NoTimeLeftError:
        return Report(
            socket.gethostname(),
            ExitCode.INCOMPLETE,
            "the time limit of its job is over; '--slurm time=LIMIT' gives more, as far as the partition allows it",
        )


def _gpu_bytes() -> int | None:
    """Asks nvidia-smi: torch would keep a context on a GPU, and may not see those that its scheduler gives out."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    hidden = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30, env=hidden).stdout
        return min((int(line) * 2**20 for line in said.split()), default=None)
    return None
