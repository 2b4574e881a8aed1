"""From the results of runs to what figures show. Nothing is read, written or drawn here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crad_p2p.results import mean
from launch.compare.tables import Outcome, Spread


@dataclass(frozen=True)
class Line:
    """One method: a mean over seeds at every x, and its spread, in per cent."""

    method: str
    x: tuple[float, ...]
    y: tuple[Spread, ...]


@dataclass(frozen=True)
class Client:
    """One peer, mean over seeds: training images, and the accuracy of each method in per cent."""

    peer: int
    train_samples: float
    accuracy: dict[str, float | None]


def learning_curves(outcomes: Sequence[Outcome]) -> list[Line]:
    """Accuracy on the common test set over the rounds in which it was measured: the mean over the peers that took part,
    then over the seeds.
    """
    lines = []
    for method, runs in _by_method(outcomes):
        points: dict[int, list[float | None]] = {}
        for run in runs:
            rounds: dict[int, list[float | None]] = {}
            for record in run.history:
                if record.global_accuracy is not None:
                    rounds.setdefault(record.round, []).append(record.global_accuracy)
            for number, values in rounds.items():
                points.setdefault(number, []).append(_percent(mean(values)))
        ordered = sorted(points)
        lines.append(Line(method, tuple(ordered), tuple(Spread.of(points[number]) for number in ordered)))
    return lines


def accuracy_by_support(outcomes: Sequence[Outcome]) -> list[Line]:
    """Accuracy of each class on the common test set, by how common the class is among a peer's own images: 1 is its
    most common one. The mean over the peers, then over the seeds.

    How common is told by the validation images, which are the same part of every class. Of classes that are equally
    common the one with the lower label comes first.
    """
    lines = []
    for method, runs in _by_method(outcomes):
        ranks: dict[int, list[float | None]] = {}
        for run in runs:
            of_run: dict[int, list[float | None]] = {}
            for peer in run.summary.peers:
                pairs = zip(peer.counts, peer.global_accuracy_per_class, strict=False)
                for rank, (_, accuracy) in enumerate(sorted(pairs, key=lambda pair: -pair[0]), start=1):
                    of_run.setdefault(rank, []).append(accuracy)
            for rank, values in of_run.items():
                ranks.setdefault(rank, []).append(_percent(mean(values)))
        lines.append(Line(method, tuple(ranks), tuple(Spread.of(values) for values in ranks.values())))
    return lines


def support_by_class(outcomes: Sequence[Outcome]) -> list[float]:
    """Validation images at each rank of :func:`accuracy_by_support`, the mean over peers and runs."""
    ranked = [sorted(peer.counts, reverse=True) for run in outcomes for peer in run.summary.peers]
    return [mean(column) or 0.0 for column in zip(*ranked, strict=False)]


def clients(outcomes: Sequence[Outcome]) -> list[Client]:
    """Support and global accuracy of every peer, by id, the mean over the seeds."""
    methods = list(_by_method(outcomes))
    return [
        Client(
            peer,
            mean(each.train_samples for run in outcomes for each in run.summary.peers if each.id == peer) or 0.0,
            {
                method: _percent(
                    mean(each.global_accuracy for run in runs for each in run.summary.peers if each.id == peer)
                )
                for method, runs in methods
            },
        )
        for peer in sorted({each.id for run in outcomes for each in run.summary.peers})
    ]


def _by_method(outcomes: Iterable[Outcome]) -> list[tuple[str, list[Outcome]]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.planned.method, []).append(outcome)
    return list(found.items())


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction
