"""The process of a run, wherever it is begun."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.children import environment
from launch.engines import LOG


def start(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Begin the run of a folder, with one thread.

    From this thread, which is the main one: a child ends with the thread that has started it.

    Args:
        arguments: see :meth:`launch.engines.Job.arguments`.
    """
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "launch.compare.run", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment(signal.SIGKILL), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
