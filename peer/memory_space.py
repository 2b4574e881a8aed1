"""Is there memory for a step of training, and for the largest teacher?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from crad_p2p.errors import ExitCode
from crad_p2p.federation import Federation
from crad_p2p.snapshot import Layout
from peer.findings import Finding, failure, ok, warning
from peer.words import in_bytes

_WHAT = "memory"
#: Up to so many times what is known of the need are worth a warning: convolutions take some for themselves.
_TIGHT = 2


def memory_need(federation: Federation, own_id: int, layouts: Mapping[str, Layout], batch_bytes: int) -> int:
    """Bytes that training takes at least: model, gradients, momentum, a batch, and the largest teacher, twice; and what
    the method keeps of the own model besides.

    A teacher is there as file and as model. What is no model is there of all peers at once, as it came and in the
    float64 of its mean; and so are the images that they have made, those of the last time and those of now. Where one
    trains for all, it has all models, as a file, as they came, and with gradients and momentum. Images of the data and
    libraries are not in it: they are there already when a learner has said that it is ready.
    """
    sizes = {key: sum(spec.nbytes for spec in layout.values()) for key, layout in layouts.items()}
    own = sizes[federation.peer(own_id).arch]
    if federation.method.aggregates:
        return 2 * own + batch_bytes + 5 * sum(sizes[federation.peer(peer).arch] for peer in federation.ids)
    largest = {peer: max(sizes[key] for key in federation.kinds_of(peer)) for peer in federation.ids}
    others = [largest[peer] for peer in federation.ids if peer != own_id]
    traits = federation.method.traits
    teachers = [*others, own] if traits.has_memory else others
    heard = 2 * max(teachers, default=0) if traits.has_teachers else 0
    if traits.publishes_predictions:
        heard = 3 * sum(others)
    if federation.method.making is not None:
        heard += 2 * sum(sizes[federation.images_key(peer)] for peer in federation.ids)
    return (3 + traits.has_peak) * own + batch_bytes + heard


def check_memory(need: int, free: int | None, where: str) -> Finding:
    """Compare.

    Args:
        free: bytes; None if the system does not say.
        where: whose memory it is: ``cuda:0``, or ``this machine``.
    """
    needs = f"a step of training takes at least {in_bytes(need)}"
    if free is None:
        return ok(_WHAT, f"{needs}; this system does not say how much is free")
    has = f"{in_bytes(free)} free on {where}"
    remedy = "end what else uses it, choose another --device, or a smaller batch or architecture for the federation"
    if free < need:
        return failure(_WHAT, ExitCode.LEARNER_FAILED, f"{has}, and {needs}", remedy)
    if free < _TIGHT * need:
        return warning(_WHAT, f"{has}, and {needs}", remedy)
    return ok(_WHAT, f"{has}; {needs}")


def free_for(ready: Mapping[str, Any]) -> tuple[int | None, str]:
    """What is free where a learner computes, and whose memory that is; from its ``ready``."""
    if ready["free_bytes"] is not None:
        return ready["free_bytes"], ready["device"]
    return free_memory(), "this machine"


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still get: of the machine, or of the control group if that has a limit."""
    found = []
    with suppress(OSError):
        if available := re.search(r"^MemAvailable:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE):
            found.append(1024 * int(available[1]))
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                found += _left(groups, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in kinds.split(","):
                limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
                found += _left(groups / "memory", path, limit, usage, "total_inactive_file")
    return min(found, default=None)


def _left(root: Path, path: str, limit: str, usage: str, cache: str) -> list[int]:
    """What each group from this one up leaves; in a container the path may be that outside, and only the root there."""
    left = []
    inner = Path(path.lstrip("/"))
    for folder in {root / each for each in (inner, *inner.parents)}:
        try:
            most = int((folder / limit).read_text())  # "max" is no number, and no limit
            used = int((folder / usage).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        left.append(max(0, most - used + int(statistics.get(cache, 0))))
    return left
