"""Is there room for two rounds on the disk?

With policy ``all`` a peer keeps two rounds of every other peer, and of its own the last two, the best one and the one
in the making; with ``quorum`` as many more of the others as they may be stale. However many rounds there
are, it keeps no more models than that; the lines and manifests that add up are small beside them, and not counted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crad_p2p.errors import ExitCode
from crad_p2p.federation import Federation
from crad_p2p.snapshot import Layout
from peer.findings import Finding, failure, ok, warning
from peer.words import in_bytes

_WHAT = "disk"
#: Own rounds that are on the disk at once.
_OWN_ROUNDS = 4
#: Up to so many times the need are worth a warning.
_TIGHT = 2


@dataclass(frozen=True)
class DiskNeed:
    """Bytes.

    Attributes:
        one_round: less than this is not even enough for the first one.
        always: what the models in the state directory grow to, and never beyond.
    """

    one_round: int
    always: int


def disk_need(federation: Federation, own_id: int, layouts: Mapping[str, Layout], posteriors: int) -> DiskNeed:
    """How much a peer will write.

    Args:
        layouts: of all that is published, as the learner reports them.
        posteriors: numbers that one teacher says of the own images: images x classes.
    """
    traits, sizes = federation.method.traits, {key: _file_bytes(layout) for key, layout in layouts.items()}
    # The momentum is about as large as the model, and so is an earlier model. Where one trains for all there is none.
    own = (2 + traits.has_peak - federation.method.aggregates) * sizes[federation.peer(own_id).arch]
    if federation.method.keeps_model:  # beside the model, which is kept all the same
        own += max(sizes[key] for key in federation.kinds_of(own_id))
    if federation.method.making is not None:  # and so are the images of all
        own += sum(sizes[federation.images_key(peer)] for peer in federation.ids)
    if not traits.has_teachers:
        return DiskNeed(own, _OWN_ROUNDS * own)
    others = [peer for peer in federation.ids if peer != own_id]
    rounds = range(federation.rounds + 1)
    received = max(sum(sizes[federation.published_by(peer, number)] for peer in others) for number in rounds)
    # Nobody runs over the own images where no models come, or one trains them all.
    heard = 0 if federation.method.keeps_model else 4 * posteriors * (len(others) + traits.has_memory)
    stale = federation.barrier.quorum(len(federation.peers))[1] if federation.barrier.policy == "quorum" else 1
    return DiskNeed(own + received + heard, _OWN_ROUNDS * own + (max(1, stale) + 1) * received + heard)


def _file_bytes(layout: Layout) -> int:
    """Of a snapshot, with a generous header: 128 bytes and the name for each tensor."""
    return sum(spec.nbytes + len(name) + 128 for name, spec in layout.items())


def check_disk(need: DiskNeed, folder: Path, *, free: int, used: int) -> Finding:
    """Compare.

    Args:
        folder: the state directory, for the sentence.
        free: bytes of its file system.
        used: bytes that its rounds take already, which are part of the need.
    """
    has = f"{in_bytes(free)} free for {folder}"
    needs = f"two rounds take {in_bytes(need.always)}" + (f", {in_bytes(used)} of them used" if used else "")
    if free + used < need.always:
        return failure(_WHAT, ExitCode.INCOMPLETE, f"{has}, and {needs}", "make room there")
    if free + used < _TIGHT * need.always:
        return warning(_WHAT, f"{has}, and {needs}", "make room before something else fills it")
    return ok(_WHAT, f"{has}; {needs}")


def free_bytes(folder: Path) -> int:
    """Free bytes, for this user, of the file system in which a directory is, or will be made.

    Raises:
        OSError: it cannot be looked at.
    """
    return shutil.disk_usage(existing(folder)).free


def used_bytes(state_dir: Path) -> int:
    """Bytes of the rounds in a state directory, own and received; 0 if there are none."""
    total = 0
    for folder in ("rounds", "received"):
        for root, _, files in os.walk(state_dir / folder):
            for name in files:
                try:
                    total += Path(root, name).stat().st_size
                except FileNotFoundError:  # deleted meanwhile
                    continue
    return total


def existing(folder: Path) -> Path:
    """The directory itself, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
