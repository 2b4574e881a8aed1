"""Named places at which a test lets a peer be killed, to show that no moment is the wrong one.

``CRAD_FAIL_POINT=NAME@ROUND`` and ``CRAD_FAIL_MARKER=PATH`` kill the process that comes by NAME in that round, once:
the marker is made first, and where it exists nothing happens. ``NAME@ROUND@both`` takes the service along with its
learner. Without these variables a fail point costs one look at the environment.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from crad_p2p.parent import employer

#: In the service, in the order of a round; a commit makes four files durable, then their directory, and renames it.
SERVICE_POINTS = (
    "manifest-received",
    "manifest-renamed",
    "snapshot-received",
    "snapshot-renamed",
    "seen-durable",
    "collected",
    "best-durable",
    "train-sent",
    "commit-begun",
    "before-fsync-checkpoint.safetensors",
    "after-fsync-checkpoint.safetensors",
    "before-fsync-snapshot.safetensors",
    "after-fsync-snapshot.safetensors",
    "before-fsync-manifest.json",
    "after-fsync-manifest.json",
    "before-fsync-record.json",
    "after-fsync-record.json",
    "before-fsync-staging",
    "after-fsync-staging",
    "after-rename",
    "after-fsync-rounds",
    "before-announce",
    "announced",
    "lineage-durable",
    "pruned",
)
#: In the learner.
LEARNER_POINTS = (
    "opened",
    "teaching",
    "taught",
    "training",
    "trained",
    "validated",
    "snapshot-written",
    "checkpoint-written",
)


def fail_point(name: str, number: int) -> None:
    """Kill this process if it is told to end here, in this round."""
    if point := os.environ.get("CRAD_FAIL_POINT"):  # not read once: a learner may have been forked by another process
        _kill_if_due(point, name, number)


def _kill_if_due(point: str, name: str, number: int) -> None:
    due, _, rest = point.partition("@")
    at, _, both = rest.partition("@")
    if (due, at) != (name, str(number)):
        return
    try:
        Path(os.environ["CRAD_FAIL_MARKER"]).touch(exist_ok=False)
    except FileExistsError:
        return
    if both and name in LEARNER_POINTS:
        os.kill(employer(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
