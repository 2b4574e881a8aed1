"""summary.json and history.jsonl, and the choice of the one round that all peers report. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from crad_p2p.durable import write_file
from crad_p2p.manifest import ClassStatistics, Manifest


@dataclass(frozen=True)
class Seconds:
    """Where a round's (or a run's) wall time went."""

    wait: float = 0.0
    transfer: float = 0.0
    teachers: float = 0.0
    train: float = 0.0
    validate: float = 0.0
    commit: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        mine, theirs = asdict(self), asdict(other)
        return Seconds(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class RoundRecord:
    """One line of history.jsonl: one peer, one round. Accuracies are fractions; global_accuracy is None where not
    evaluated. ``skipped_rounds`` are those before this one that the peer did not publish, since the mesh went on
    without it; its model of this round is then its last one, published again. The peak's accuracy is that of an earlier
    model of the peer, where the method has one.
    """

    peer: int
    round: int
    snapshot_sha256: str
    validation_accuracy: float | None
    global_accuracy: float | None = None
    peak_global_accuracy: float | None = None
    train_loss: float | None = None
    target_mass: float | None = None
    target_collapsed: float | None = None
    target_top1: float | None = None
    redone: int = 0
    teachers: tuple[int, ...] = ()
    missing_teachers: tuple[int, ...] = ()
    stale_teachers: tuple[int, ...] = ()
    quarantined_teachers: tuple[int, ...] = ()
    quarantine_reasons: Mapping[str, str] = field(default_factory=dict)
    skipped_rounds: tuple[int, ...] = ()
    seconds: Seconds = Seconds()
    bytes_sent: int = 0
    bytes_received: int = 0

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> RoundRecord:
        tree = json.loads(line)
        lists = {name: tuple(value) for name, value in tree.items() if isinstance(value, list)}
        return cls(**{**tree, **lists, "seconds": Seconds(**tree["seconds"])})


@dataclass(frozen=True)
class PeerResult:
    """One peer's entry in summary.json. Accuracies are of the best round, ``snapshot_sha256`` of the last.

    ``teacher_precision`` is what its teachers computed in: ``float32`` or ``bfloat16``; None in older results.
    """

    id: int
    arch: str
    train_samples: int
    rounds_completed: int
    snapshot_sha256: str
    global_accuracy: float | None = None
    local_accuracy: float | None = None
    global_accuracy_per_class: tuple[float | None, ...] = ()
    counts: tuple[int, ...] = ()
    hits: tuple[int, ...] = ()
    seconds: Seconds = Seconds()
    bytes: Mapping[str, int] = field(default_factory=lambda: {"sent": 0, "received": 0})
    peak_rss_bytes: int = 0
    missing_teachers: tuple[int, ...] = ()
    stale_teachers: tuple[int, ...] = ()
    quarantined_teachers: tuple[int, ...] = ()
    quarantine_reasons: Mapping[str, str] = field(default_factory=dict)
    skipped_rounds: tuple[int, ...] = ()
    best_round: int | None = None
    teacher_precision: str | None = None
    peak_global_accuracy: float | None = None
    peak_local_accuracy: float | None = None

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> PeerResult:
        lists = {name: tuple(value) for name, value in tree.items() if isinstance(value, list)}
        return cls(**{**tree, **lists, "seconds": Seconds(**tree["seconds"])})


@dataclass(frozen=True)
class Summary:
    """summary.json: the promised result of a run (docs/results-files.md)."""

    federation: str
    config_digest: str
    method: str
    transport: str
    rounds: int
    complete: bool
    best_round: int | None
    mean_global_accuracy: float | None
    mean_local_accuracy: float | None
    wall_seconds: float
    peers: tuple[PeerResult, ...]

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_file(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Summary:
        tree = json.loads(path.read_text())
        return cls(**{**tree, "peers": tuple(PeerResult.from_json(peer) for peer in tree["peers"])})


def mean(values: Iterable[float | None]) -> float | None:
    """Unweighted mean of what is there; None if nothing is."""
    there = [value for value in values if value is not None]
    return math.fsum(there) / len(there) if there else None


def mean_validation_accuracy(statistics: Sequence[ClassStatistics]) -> float | None:
    """The number that decides the best round: the unweighted mean over peers, in id order, of their validation
    accuracy.
    """
    return mean(each.accuracy for each in statistics)


@dataclass
class BestRound:
    """The common round to report: the first with the highest mean validation accuracy, of rounds 1 to R.

    Every peer computes it from the same manifests, so all choose the same without a word.
    """

    round: int | None = None
    accuracy: float | None = None

    def offer(self, number: int, manifests: Sequence[Manifest]) -> bool:
        """Consider a round's manifests, one of every peer; True if that round is now the best.

        A round is better only if strictly so; one in which no peer has a validation sample counts as accuracy 0. For a
        peer that was missing under policy ``quorum`` its newest older manifest stands, so that means stay comparable.
        """
        ordered = sorted(manifests, key=lambda manifest: manifest.peer)
        accuracy = mean_validation_accuracy([manifest.statistics for manifest in ordered]) or 0.0
        if number < 1 or (self.accuracy is not None and accuracy <= self.accuracy):
            return False
        self.round, self.accuracy = number, accuracy
        return True


def total(records: Iterable[RoundRecord], result: PeerResult) -> PeerResult:
    """Add what a peer's history says over all rounds to its entry: seconds, bytes, and which teachers were ever
    absent.
    """
    history = list(records)
    return replace(
        result,
        seconds=sum((record.seconds for record in history), Seconds()),
        bytes={
            "sent": sum(record.bytes_sent for record in history),
            "received": sum(record.bytes_received for record in history),
        },
        missing_teachers=_union(record.missing_teachers for record in history),
        stale_teachers=_union(record.stale_teachers for record in history),
        quarantined_teachers=_union(record.quarantined_teachers for record in history),
        quarantine_reasons={peer: why for record in history for peer, why in record.quarantine_reasons.items()},
        skipped_rounds=_union(record.skipped_rounds for record in history),
    )


def _union(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({peer for group in groups for peer in group}))
