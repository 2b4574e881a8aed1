"""The process of one run: the simulation of the federation in its folder, with one thread.

It reads ``peers.yaml`` of the folder, adds to ``history.jsonl`` after every round, and ends with ``models/`` if that is
to be kept, ``cost.json`` and, last of all, ``summary.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from crad_p2p.errors import CradError
from crad_p2p.parent import end_with_named_parent
from crad_p2p.starting import leave_on_signals

if TYPE_CHECKING:
    from crad_p2p.data.datasets import Dataset
    from crad_p2p.federation import Federation
    from crad_p2p.results import RoundRecord

COST, HISTORY, SUMMARY = "cost.json", "history.jsonl", "summary.json"
#: For files that are of no use when the process has ended, however that was.
_SCRATCH = "scratch"


@dataclass(frozen=True)
class Cost:
    """What a run took, and of what it was.

    Attributes:
        cpu_seconds: of this process, a round; of one in which all active peers learn, validate and are tested where
            that was due. Without the first round, in which things are made ready, if there are more.
        wall_seconds: likewise; the peers of a run compute one after another.
        bytes_sent: snapshot bytes that a peer would send in a round in which it takes part, the mean over the peers and
            rounds: computed. None in runs of earlier versions of methods whose peers do not publish models.
        device: where it computed.
        partition: digest of the labels and of all shards.
    """

    cpu_seconds: float
    wall_seconds: float
    bytes_sent: float | None
    device: str
    partition: str

    def write(self, path: Path) -> None:
        from crad_p2p.durable import write_file

        write_file(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Cost:
        return cls(**json.loads(path.read_text()))


def bytes_sent(federation: Federation, *, classes: int, image_shape: Sequence[int]) -> float:
    """See :class:`Cost`: each active peer sends its snapshot to every other one that is active with it."""
    from crad_p2p.methods.build import layouts_of
    from crad_p2p.snapshot import file_bytes

    if not federation.method.traits.has_teachers:
        return 0.0
    layouts = layouts_of(federation, classes=classes, image_shape=image_shape)
    sizes = {key: file_bytes(layout) for key, layout in layouts.items()}
    peers, rounds = federation.ids, range(1, federation.rounds + 1)
    published = sum(sizes[federation.published_by(peer, number)] for peer in peers for number in rounds)
    receivers = (federation.participation or len(peers)) - 1
    return receivers * published / (len(peers) * len(rounds))


class _Watch:
    """Notes the time of every round, and adds its records to the history at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._times = [(time.process_time(), time.monotonic())]

    def round_done(self, _number: int, records: Sequence[RoundRecord]) -> None:
        self._file.writelines(record.to_line() for record in records)
        self._file.flush()
        self._times.append((time.process_time(), time.monotonic()))

    def per_round(self) -> tuple[float, float]:
        """CPU and wall seconds."""
        times = self._times[1:] if len(self._times) > 2 else self._times
        first, last = times[0], times[-1]
        return (last[0] - first[0]) / (len(times) - 1), (last[1] - first[1]) / (len(times) - 1)


@contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """Let temporary files go there, so that those of a process that was killed are found and removed by the next."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)


def perform(folder: Path, *, data_dir: Path, device: str, precision: str, keeps_models: bool = False) -> None:
    """Make the run of a folder.

    Raises:
        CradError: it cannot be made.
    """
    import torch

    from crad_p2p.data.datasets import load_dataset
    from crad_p2p.data.partition import make_splits, partition_digest
    from crad_p2p.device import resolve_device, resolve_precision
    from crad_p2p.federation import load_federation
    from crad_p2p.simulation import simulate
    from launch.collect import write_results
    from launch.kept import keep_models

    torch.set_num_threads(1)
    federation = load_federation(folder / "peers.yaml")
    images: Dataset = load_dataset(federation.data, seed=federation.seed, data_dir=data_dir)
    train = images.train
    on = resolve_device(device)
    watch = _Watch(folder / HISTORY)
    with _scratch(folder / _SCRATCH):
        summary, history = simulate(
            federation,
            images,
            device=on,
            precision=resolve_precision(precision, on),
            threads=1,
            workers=1,
            on_round=watch.round_done,
            on_end=partial(keep_models, folder, federation) if keeps_models else lambda _published: None,
        )
    cpu, wall = watch.per_round()
    Cost(
        cpu_seconds=cpu,
        wall_seconds=wall,
        bytes_sent=bytes_sent(federation, classes=len(images.class_names), image_shape=images.train.images.shape[1:]),
        device=str(on),
        partition=partition_digest(
            train.labels,
            make_splits(train.labels, federation.data, federation.ids, federation.seed, train.groups),
            groups=train.groups,
        ),
    ).write(folder / COST)
    write_results(folder, summary, history)


def main() -> None:
    """Entry point of the process."""
    leave_on_signals("crad-mesh compare")
    end_with_named_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--keep-models", action="store_true")
    given = parser.parse_args()
    try:
        perform(
            given.folder,
            data_dir=given.data_dir,
            device=given.device,
            precision=given.precision,
            keeps_models=given.keep_models,
        )
    except CradError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
