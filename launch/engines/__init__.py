"""Where the runs of a comparison are made.

``local`` begins processes of this machine. ``scheduled`` hands runs to a scheduler that begins them when it has room:
``ray_cluster`` and ``slurm``, whose nodes do what ``node`` says.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

#: In the folder of a run: all that its process has said.
LOG = "log.txt"


@dataclass(frozen=True)
class Need:
    """Memory that a run takes at most, as far as it can be told beforehand, in bytes.

    Attributes:
        host: of the machine.
        device: of a GPU, if it computes on one.
    """

    host: int
    device: int


@dataclass(frozen=True)
class Job:
    """One run, which says everything in its folder: what it is, how far it has come, and its result.

    Attributes:
        folder: as :mod:`launch.compare.run` expects it; an engine that uses other machines needs it to be shared. What
            the process says goes to the file ``LOG`` in it.
        data_dir: where the files of named data sets are.
        precision: in what teachers compute, as ``--precision`` takes it.
        keeps_models: the last models of all peers stay in the folder.
    """

    name: str
    folder: Path
    data_dir: Path
    precision: str
    need: Need
    keeps_models: bool = False

    def arguments(self, device: str) -> list[str]:
        """Of the module :mod:`launch.compare.run`, to make the run on this device."""
        named = {"--folder": self.folder, "--data-dir": self.data_dir, "--precision": self.precision}
        words = [str(word) for pair in {**named, "--device": device}.items() for word in pair]
        return [*words, *(["--keep-models"] if self.keeps_models else [])]


@dataclass(frozen=True)
class Began:
    """A run has been begun."""

    job: Job
    device: str


@dataclass(frozen=True)
class Ended:
    """A run is over: with this exit code, or by the signal of this negative number.

    Attributes:
        why: it failed, if its engine knows what its log cannot say; else empty.
    """

    job: Job
    code: int
    why: str = ""


class Engine(Protocol):
    """Makes runs, in their order, as many at once as it has room for."""

    def run(self, jobs: Sequence[Job]) -> Generator[Sequence[Began | Ended], None, None]:
        """Make all of them; one that fails does not keep the others.

        Yields:
            What has happened since it last did, at least about once a second even if that is nothing, so that its
            caller can show how far the runs have come. When it is closed before the end, it first ends every run that
            it has begun.
        """
        ...
