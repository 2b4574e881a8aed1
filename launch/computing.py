"""How the learners on this machine compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Computing:
    """The same for a peer and for a simulation: equal options give equal bytes."""

    threads: int
    device: str
    precision: str
    data_dir: Path

    def arguments(self) -> list[str]:
        """As options of ``crad-peer`` and ``crad-mesh simulate``."""
        named = {"--threads": self.threads, "--device": self.device, "--precision": self.precision}
        return [str(word) for pair in {**named, "--data-dir": self.data_dir}.items() for word in pair]
