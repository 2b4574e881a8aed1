"""Is there room for the run on this host, as far as a learner that is ready lets one tell?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crad_p2p.federation import Federation
from crad_p2p.snapshot import layout_from_json
from peer.disk_space import check_disk, disk_need, free_bytes, used_bytes
from peer.findings import Finding
from peer.host import Host
from peer.memory_space import check_memory, free_for, memory_need


@dataclass(frozen=True)
class Room:
    """What was found; without room for a single round, a start is in vain."""

    memory: Finding
    disk: Finding
    fits_one_round: bool


def check_room(federation: Federation, host: Host, ready: Mapping[str, Any]) -> Room:
    """Look at memory and disk.

    Args:
        ready: what the learner has said.

    Raises:
        OSError: the disk cannot be looked at.
    """
    layouts = {arch: layout_from_json(layout) for arch, layout in ready["layouts"].items()}
    posteriors = ready["train_samples"] * len(ready["class_names"])
    disk = disk_need(federation, host.peer_id, layouts, posteriors)
    free, used = free_bytes(host.state_dir), used_bytes(host.state_dir)
    memory = memory_need(federation, host.peer_id, layouts, ready["batch_bytes"])
    return Room(
        memory=check_memory(memory, *free_for(ready)),
        disk=check_disk(disk, host.state_dir, free=free, used=used),
        fits_one_round=free + used >= disk.one_round,
    )
