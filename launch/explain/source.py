"""The snapshots of all peers of one round, from a run of ``up`` or from the models that a simulation has kept.

Both lie as state directories do. Every manifest and file passes the checks that it passes between peers, and the
values those of a learner, before a model is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from crad_p2p import weights
from crad_p2p.data.datasets import Dataset
from crad_p2p.data.epoch import plain_batches
from crad_p2p.data.partition import make_splits, validation_counts
from crad_p2p.errors import ConfigurationError, IncompleteError, UsageError
from crad_p2p.explanation import Teacher
from crad_p2p.federation import Federation, load_federation
from crad_p2p.frozen import frozen
from crad_p2p.manifest import Manifest
from crad_p2p.methods.build import layouts_of
from crad_p2p.results import Summary
from crad_p2p.snapshot import SNAPSHOT_FILE, SnapshotError
from crad_p2p.teachers import posterior_of_logits
from launch.kept import FEDERATION_FILE, has_models, models_dir
from launch.mesh import peer_dir
from peer.credentials import CA_FILE, load_authorities
from peer.intake import Intake
from peer.signatures import Authorities
from peer.store import MANIFEST, Store
from peer.words import name_peers

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Source:
    """Where the peers of a run keep their snapshots.

    Attributes:
        file: the federation file.
        stores: by id.
        is_simulation: whether these are models that a simulation has kept, and not state directories.
    """

    directory: Path
    file: Path
    federation: Federation
    stores: dict[int, Store]
    is_simulation: bool


def find(directory: Path, data_dir: Path | None) -> Source:
    """See what run is in a directory.

    Raises:
        UsageError: none, or none with snapshots; says what would be one.
        ConfigurationError: its federation file cannot be read.
    """
    if not directory.is_dir():
        raise UsageError(
            f"--run {directory}: there is no such directory; give the --out directory of 'crad-mesh up', or of "
            f"'crad-mesh simulate --keep-models'"
        )
    if (directory / "peers").is_dir() and (directory / FEDERATION_FILE).is_file():
        federation = load_federation(directory / FEDERATION_FILE, data_dir)
        stores = {peer: Store(peer_dir(directory, peer)) for peer in federation.ids}
        return Source(directory, directory / FEDERATION_FILE, federation, stores, is_simulation=False)
    if has_models(directory):
        models = models_dir(directory)
        federation = load_federation(models / FEDERATION_FILE, data_dir)
        stores = {peer: Store(models / str(peer)) for peer in federation.ids}
        return Source(directory, models / FEDERATION_FILE, federation, stores, is_simulation=True)
    raise UsageError(f"--run {directory}: {_what_is_there(directory)}")


def _what_is_there(directory: Path) -> str:
    if runs := sorted(path.parent.name for path in directory.glob(f"runs/*/{FEDERATION_FILE}")):
        return f"holds a comparison; give the folder of one of its runs, such as {directory / 'runs' / runs[0]}"
    if (directory / "summary.json").is_file():
        return "holds a simulation without its models; make it again with --keep-models, and give that directory"
    if (directory / FEDERATION_FILE).is_file():
        return (
            "holds no snapshots: the run was not begun, or it is a simulation that is not finished; with --keep-models "
            "its models are kept at its end"
        )
    if (directory / "federation.json").is_file():
        return "is the state directory of one peer; give the directory of the whole run, two levels above"
    return "holds no run; give the --out directory of 'crad-mesh up', or of 'crad-mesh simulate --keep-models'"


def common_round(source: Source) -> int:
    """The last round as of which every peer's snapshot is there: as of a round in which one has no part, that is the
    one that it published before.

    Raises:
        IncompleteError: there is none; says which rounds there are.
    """
    federation = source.federation
    kept = {peer: set(store.kept_rounds()) for peer, store in source.stores.items()}
    if absent := [peer for peer, rounds in kept.items() if not rounds]:
        raise IncompleteError(
            f"{source.directory}: no snapshot of {name_peers(absent)} is there; {_remedy(source)}, until every peer "
            f"has published"
        )
    for number in range(max(map(max, kept.values())), -1, -1):
        number = min(number, federation.rounds)
        if all(federation.version(peer, number) in rounds for peer, rounds in kept.items()):
            return number
    there = "; ".join(f"peer {peer}: {', '.join(map(str, sorted(rounds)))}" for peer, rounds in kept.items())
    raise IncompleteError(
        f"{source.directory}: there is no round of which all peers have a snapshot, but {there}; {_remedy(source)}"
    )


def ahead_of(source: Source, number: int) -> list[int]:
    """Peers that have published after the common round."""
    return [
        peer for peer, store in source.stores.items() if store.last_round() > source.federation.version(peer, number)
    ]


def _remedy(source: Source) -> str:
    if source.is_simulation:
        return "make the run again with --keep-models"
    return f"run 'crad-mesh up' again, which continues it (--out {source.directory})"


def ask(source: Source, number: int, dataset: Dataset, pixels: NDArray[np.uint8]) -> dict[int, Teacher]:
    """What every peer's model as of a round says of one image, by id: one model at a time, in float32, on the CPU.

    Args:
        pixels: uint8 [C, H, W].

    Raises:
        IncompleteError: snapshots are damaged, or must not be used; names all of them. Or one is gone.
        ConfigurationError: they are not those of the results beside them.
        CertificateError: the CA's file is none.
    """
    asker = _Asker(source, dataset, pixels)
    found: dict[int, Teacher] = {}
    faults = []
    for peer, store in source.stores.items():
        folder = store.round_dir(source.federation.version(peer, number))
        try:
            found[peer] = asker.ask(peer, folder, source.federation.version(peer, number))
        except SnapshotError as error:
            faults.append(f"{folder} ({error})")
        except OSError as error:
            if not folder.exists():
                raise IncompleteError(
                    f"{folder}: was there a moment ago; the peers that run have gone on: start the same command again"
                ) from None
            faults.append(f"{folder} ({Path(error.filename or folder).name}: {error.strerror})")
    if faults:
        many = len(faults) > 1
        raise IncompleteError(
            f"{len(faults)} snapshot{'s' if many else ''} of {source.directory} cannot be used: {'; '.join(faults)}; "
            f"put back a copy, or {_remedy(source)}" + ("" if source.is_simulation else " with --recover")
        )
    return found


class _Asker:
    def __init__(self, source: Source, dataset: Dataset, pixels: NDArray[np.uint8]) -> None:
        federation = source.federation
        self._federation = federation
        self._classes = len(dataset.class_names)
        channels, height, width = dataset.train.images.shape[1:]
        self._shape = (channels, height, width)
        self._temperature = federation.method.temperature
        labels = dataset.train.labels
        splits = make_splits(labels, federation.data, federation.ids, federation.seed, dataset.train.groups)
        authorities = _authorities(source)
        self._intake = Intake(
            federation,
            layouts_of(federation, classes=self._classes, image_shape=self._shape),
            self._classes,
            None if authorities is None else lambda: authorities,
            samples={peer: tuple(n) for peer, n in validation_counts(labels, splits, self._classes).items()},
        )
        self._summary = _summary(source)
        self._directory = source.directory
        image = plain_batches(
            pixels[None],
            np.zeros(1, dtype=np.int64),
            batch_size=1,
            mean=dataset.mean,
            std=dataset.std,
            device=_CPU,
        )
        self._pixels = image.pixels(image.batches[0])

    def ask(self, peer: int, folder: Path, number: int) -> Teacher:
        manifest = self._intake.manifest((folder / MANIFEST).read_bytes(), peer, number)
        self._intake.snapshot(folder / SNAPSHOT_FILE, manifest)
        self._see_that_it_is_of_the_results(manifest)
        tensors = weights.decode((folder / SNAPSHOT_FILE).read_bytes())
        weights.check_values(tensors)
        model = frozen(manifest.arch, self._classes, self._shape).bind(tensors, torch.float32, 1)
        weights.probe(model, self._shape, _CPU)
        with torch.no_grad():
            posterior = posterior_of_logits(model(self._pixels), self._temperature)[0]
        if not bool(torch.isfinite(posterior).all()):
            raise SnapshotError("its predictions on the image are not finite")
        return Teacher(peer, manifest.arch, number, manifest.statistics, tuple(posterior.tolist()))

    def _see_that_it_is_of_the_results(self, manifest: Manifest) -> None:
        """A simulation without --keep-models may have written its results over those of one with it."""
        if self._summary is None:
            return
        said = {result.id: result.snapshot_sha256 for result in self._summary.peers}
        if said.get(manifest.peer) != manifest.sha256:
            raise ConfigurationError(
                f"{models_dir(self._directory)} holds the models of another run than that of the summary.json beside "
                f"it; make the run again with --keep-models"
            )


def _summary(source: Source) -> Summary | None:
    if not source.is_simulation:
        return None
    path = source.directory / "summary.json"
    try:
        return Summary.read(path)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"{path} is damaged, so it cannot be told whether the models beside it are of that run; make it again with "
            f"--keep-models"
        ) from None


def _authorities(source: Source) -> Authorities | None:
    """The CA of a mesh's throw-away certificates; nothing is signed in a simulation."""
    if source.is_simulation:
        return None
    return load_authorities(source.directory / "tls" / CA_FILE, "put back the directory of the run as it was")


def others(found: dict[int, Teacher], student: int) -> Sequence[Teacher]:
    """All but the student, in id order."""
    return [found[peer] for peer in sorted(found) if peer != student]
