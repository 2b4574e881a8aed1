"""Snapshots of a simulation's last round, kept on disk as peers keep theirs: ``models/`` of its directory.

    models/peers.yaml                         the federation
    models/3/rounds/000012/                   snapshot.safetensors and manifest.json of peer 3

So a peer's folder is read as its state directory would be. Nothing is signed: there are no keys in a simulation.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crad_p2p.durable import write_file
from crad_p2p.errors import IncompleteError, UsageError
from crad_p2p.federation import Federation
from crad_p2p.snapshot import SNAPSHOT_FILE
from launch.quick import write_federation
from peer.store import MANIFEST, Store

if TYPE_CHECKING:
    from crad_p2p.simulation import Published

FEDERATION_FILE = "peers.yaml"


def models_dir(out: Path) -> Path:
    """Where the models of a simulation are (or would be)."""
    return out / "models"


def has_models(out: Path) -> bool:
    """Whether a simulation has kept its models there."""
    return (models_dir(out) / FEDERATION_FILE).is_file()


def require_place(out: Path) -> None:
    """See that models can be kept there without deleting what is somebody else's.

    Raises:
        UsageError: they cannot.
    """
    goal = models_dir(out)
    if goal.exists() and not has_models(out):
        raise UsageError(
            f"{goal} is there already, and holds no models of a simulation; choose another --out, or move it away"
        )


def keep_models(out: Path, federation: Federation, published: Sequence[Published]) -> None:
    """Write what every client has published last; models of an earlier run are replaced.

    Raises:
        UsageError: see :func:`require_place`.
        IncompleteError: the disk is full or failed.
    """
    require_place(out)
    goal = models_dir(out)
    partial = goal.with_name(f"{goal.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir()
        for each in published:
            folder = Store(partial / str(each.manifest.peer)).round_dir(each.manifest.round)
            folder.mkdir(parents=True)
            write_file(folder / SNAPSHOT_FILE, each.snapshot)
            write_file(folder / MANIFEST, each.manifest.to_bytes())
        write_federation(federation, partial / FEDERATION_FILE)
        if goal.exists():
            shutil.rmtree(goal)
        partial.rename(goal)
    except OSError as error:
        raise IncompleteError(
            f"the models could not be kept in {goal} ({error.strerror}); mend that and start the same command again, "
            f"or leave out --keep-models"
        ) from None
