"""What a chaos run does to a mesh: a plan of faults, drawn from a seed and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "cut"]

#: Mean seconds from one fault to the next.
_GAP = 2.5
#: Seconds that a stop or cut lasts; the longest is more than the links need to notice a silent one.
_SHORTEST, _LONGEST = 0.3, 16.0
#: Seconds that a killed peer stays away.
_AWAY = 4.0


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        after: seconds since the fault before, at most.
        kind: ``kill`` (SIGKILL), ``stop`` (SIGSTOP, later SIGCONT) or ``cut`` (of links).
        how: of a kill or stop, which processes: ``service``, ``learner``, ``both``; of a cut, ``silent`` (a black
            hole), ``half-open`` (one direction of it), ``reset`` (connections break, new ones are refused), ``slow``.
        peers: whom it hits. A cut parts them from all others, or the two of ``pair`` from each other.
        lasts: seconds until it is undone; for a kill, until the peer is started again.
    """

    after: float
    kind: Kind
    how: str
    peers: tuple[int, ...]
    lasts: float
    pair: bool = False

    def __str__(self) -> str:
        who = f"peer{'s' if len(self.peers) > 1 else ''} {', '.join(map(str, self.peers))}"
        if self.kind == "cut":
            where = f"between {who}" if self.pair else f"between {who} and all others"
            return f"{self.how} cut {where}, for {self.lasts:.1f} s"
        what = "service and learner" if self.how == "both" else self.how
        if self.kind == "stop":
            return f"stop the {what} of {who}, for {self.lasts:.1f} s"
        back = "" if self.how == "learner" else f"; started again after {self.lasts:.1f} s"
        return f"kill the {what} of {who}{back}"


def plan(ids: Sequence[int], seed: int) -> Iterator[Fault]:
    """Faults without end, always the same for the same ids and seed."""
    draw = random.Random(f"chaos {seed}")
    while True:
        after = draw.expovariate(1 / _GAP)
        kind: Kind = draw.choices(("kill", "stop", "cut"), (4, 2, 3))[0]
        lasts = draw.uniform(_SHORTEST, draw.choice((1.0, 4.0, _LONGEST)))
        if kind == "cut":
            yield _cut(draw, ids, after, lasts)
            continue
        everybody = draw.random() < 0.1
        peers = tuple(ids) if everybody else tuple(sorted(draw.sample(ids, draw.choice((1, 1, 1, min(2, len(ids)))))))
        how = draw.choice(("service", "learner", "both"))
        yield Fault(after, kind, how, peers, draw.uniform(0, _AWAY) if kind == "kill" else lasts)


def _cut(draw: random.Random, ids: Sequence[int], after: float, lasts: float) -> Fault:
    how = draw.choice(("silent", "silent", "half-open", "reset", "slow"))
    if draw.random() < 0.5 and len(ids) > 1:
        return Fault(after, "cut", how, tuple(sorted(draw.sample(ids, 2))), lasts, pair=True)
    size = draw.choice((1, 1, max(1, len(ids) // 2)))
    return Fault(after, "cut", how, tuple(sorted(draw.sample(ids, size))), lasts)
