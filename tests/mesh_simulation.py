"""A whole mesh in virtual time: one thread, one seed, every fault that a site may have.

    python tests/mesh_simulation.py 5000 20000     soak: runs these seeds, prints what fails and how fast it went
    python tests/mesh_simulation.py 5007           one seed, with what happened to each peer

Modes: ``safety`` goes on with faults to the end of time; in ``liveness`` the faults stop at some point, some peers stay
down for good if the policy allows it, and all others must finish. The laws hold all the time in both.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mesh_laws import Plan
from mesh_model import Action, Mesh

from peer.barrier import Quorum

#: Seconds that each step takes: from, to. Those of the learner are multiplied by the slowness of its peer.
_SECONDS = {
    "ask": (0.01, 0.3),
    "news": (0.01, 0.5),
    "notice": (0.1, 3.0),
    "heartbeat": (1.0, 5.0),
    "transfer": (0.05, 1.0),
    "commit": (0.05, 0.5),
    "show": (0.01, 0.2),
    "learner starts": (0.5, 3.0),
    "learner ends": (0.1, 1.0),
    "teach": (0.05, 0.5),
    "train": (1.0, 5.0),
    "evaluate": (0.5, 2.0),
    "started again": (1.0, 10.0),
}
_LEARNERS = {"teach", "train", "evaluate"}

#: Virtual seconds: faults stop before this in mode liveness, and a run in mode safety ends.
_FAULTY = 150.0
#: Within so long after the last fault everybody must have finished.
_BOUND = 6000.0
#: Steps of a run after which it cannot be expected to end.
_MOST = 100_000


class SimulationError(AssertionError):
    """A seed that shows a fault."""


@dataclass(frozen=True)
class Site:
    """One peer's machine."""

    slowness: float
    line: float  # its transfers take so many times as long
    clock_zero: float
    clock_rate: float


class Simulation:
    """One seed. Implements :class:`mesh_model.Scheduler`."""

    def __init__(self, seed: int, **planned: Any) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.policy = ("all", "quorum")[seed % 2]
        self.mode = ("safety", "liveness")[seed // 2 % 2]
        self.now = 0.0
        self.events = 0
        self.dead: set[int] = set()
        self._queue: list[tuple[float, int, Action]] = []
        self._count = itertools.count()
        self.plan = self._draw_plan(**planned)
        self.sites = [self._draw_site() for _ in range(self.plan.peers)]
        self.faulty = True
        self.fault_every = self.random.choice([math.inf, 60.0, 15.0, 5.0, 2.0])
        self.loss = self.random.choice([0.0, 0.1, 0.5])
        self.late = self.random.choice([0.0, 0.05, 0.3])  # share of steps that take much longer
        self.mesh = Mesh(self.plan, self)

    # --- the world of this seed ---

    def _draw_plan(self, **planned: Any) -> Plan:
        draw = self.random
        peers, rounds = draw.choice([2, 2, 3, 3, 3, 4, 4, 5, 6, 7]), draw.randint(2, 6)
        peers = planned.get("peers", peers)
        quorum = None
        if self.policy == "quorum":
            least = draw.randint(peers // 2 + 1, peers) if draw.random() < 0.3 else peers // 2 + 1
            quorum = Quorum(least, max_staleness=draw.randint(0, 3), grace=draw.choice([0.5, 3.0, 10.0]))
        teaching = {}
        if draw.random() < 0.3:  # warm-up: nobody teaches
            teaching = {number: frozenset[int]() for number in range(1, draw.randint(1, rounds) + 1)}
        elif draw.random() < 0.3:  # partial participation
            teaching = {
                number: frozenset(draw.sample(range(peers), draw.randint(1, peers))) for number in range(1, rounds + 1)
            }
        unfit, unusable = (
            frozenset((draw.randrange(peers), draw.randint(0, rounds)) for _ in range(draw.choice([0, 0, 0, 2])))
            for _ in range(2)
        )
        fields = {"peers": peers, "rounds": rounds, "quorum": quorum, "start_wait": draw.choice([20.0, 60.0])}
        return Plan(**{**fields, "teaching": teaching, "unfit": unfit, "unusable": unusable, **planned})

    def _draw_site(self) -> Site:
        draw = self.random
        return Site(
            slowness=draw.choice([1.0, 1.0, 1.0, 3.0, 20.0]),
            line=draw.choice([1.0, 1.0, 10.0]),
            clock_zero=draw.uniform(-1e4, 1e4),
            clock_rate=draw.uniform(0.98, 1.02),
        )

    # --- Scheduler ---

    def after(self, peer: int, what: str, action: Action) -> None:
        low, high = _SECONDS[what]
        seconds = self.random.uniform(low, high)
        if what in _LEARNERS:
            seconds *= self.sites[peer].slowness
        elif what == "transfer":
            seconds *= self.sites[peer].line
        if self.faulty and self.random.random() < self.late:
            seconds *= self.random.uniform(1.0, 20.0)
        self._at(self.now + seconds, action)

    def wake(self, peer: int, local: float, action: Action) -> None:
        site = self.sites[peer]
        self._at(max(self.now, site.clock_zero + local / site.clock_rate), action)

    def clock(self, peer: int) -> float:
        site = self.sites[peer]
        return (self.now - site.clock_zero) * site.clock_rate

    def copies(self) -> int:
        if not self.faulty:
            return 1
        return 0 if self.random.random() < self.loss else self.random.choice([1, 1, 1, 2])

    def _at(self, when: float, action: Action) -> None:
        heapq.heappush(self._queue, (when, next(self._count), action))

    # --- the run ---

    def run(self) -> Simulation:
        """To the end.

        Raises:
            SimulationError: something is broken; says how to run this seed again.
        """
        try:
            self._run()
        except Exception as error:
            raise SimulationError(
                f"seed {self.seed} ({self.policy}, {self.mode}) at {self.now:.3f} s: {type(error).__name__}: {error}\n"
                f"{self.mesh.explain()}\nagain: python tests/mesh_simulation.py {self.seed}"
            ) from error
        return self

    def _run(self) -> None:
        for i in range(self.plan.peers):
            self._at(self.random.uniform(0.0, self.random.choice([1.0, 10.0, 40.0])), lambda i=i: self.mesh.boot(i))
        if self.fault_every < math.inf:
            self._at(self._until_next_fault(), self._fail)
        if self.mode == "safety":
            self._run_until(_FAULTY)
        else:
            stop = self.random.uniform(0.0, _FAULTY)
            self._run_until(stop)
            self._mend_everything()
            self._run_until(stop + _BOUND)
            late = [i for i in self.mesh.late if i not in self.dead]
            assert not late, f"faults stopped at {stop:.3f} s, dead are {sorted(self.dead)}, and never done are {late}"
        self._check_digests()
        self.mesh.replay()

    def _run_until(self, end: float) -> None:
        while self._queue and self._queue[0][0] <= end and not all(map(self.mesh.is_done, range(self.plan.peers))):
            self.now, _, action = heapq.heappop(self._queue)
            self.events += 1
            assert self.events < _MOST, "they never come to rest"
            action()
        self.now = end

    def _check_digests(self) -> None:
        if self.plan.quorum is None:
            undisturbed = self.plan.undisturbed()
            for key, snapshot in self.mesh.laws.published.items():
                assert snapshot.digest == undisturbed[key], f"(peer, round) {key} differs from an undisturbed run"

    # --- faults ---

    def _until_next_fault(self) -> float:
        return self.now + self.random.expovariate(1 / self.fault_every)

    def _fail(self) -> None:
        if self.faulty:
            self.random.choice(self._faults())()
            self._at(self._until_next_fault(), self._fail)

    def _faults(self) -> list[Callable[[], None]]:
        mesh, draw = self.mesh, self.random
        i, seconds = draw.randrange(self.plan.peers), draw.uniform(0.1, draw.choice([5.0, 30.0, 90.0]))

        def crash() -> None:
            mesh.crash(i)
            later(lambda: mesh.boot(i))

        def learner() -> None:
            if (service := mesh.services[i]) is not None and i not in mesh.paused:
                service.lose_learner()

        def pause() -> None:
            mesh.pause(i)
            later(lambda: mesh.resume(i))

        def fill_disk() -> None:
            mesh.disks[i].is_full = True
            later(mend_disk)

        def mend_disk() -> None:
            mesh.disks[i].is_full = False
            mesh.boot(i)

        def cut(*links: tuple[int, int]) -> None:
            mesh.cut(*links)
            later(lambda: mesh.mend(*links))

        def one_way() -> None:
            cut((i, draw.choice(self.plan.others(i))))

        def both_ways() -> None:
            j = draw.choice(self.plan.others(i))
            cut((i, j), (j, i))

        def partition() -> None:
            one = draw.sample(range(self.plan.peers), draw.randint(1, self.plan.peers - 1))
            other = [j for j in range(self.plan.peers) if j not in one]
            cut(*itertools.product(one, other), *itertools.product(other, one))

        def later(action: Action) -> None:
            self._at(self.now + seconds, lambda: action() if self.faulty else None)

        return [crash, crash, learner, pause, fill_disk, one_way, both_ways, partition]

    def _mend_everything(self) -> None:
        self.faulty = False
        mesh, draw = self.mesh, self.random
        running = [i for i in range(self.plan.peers) if i not in mesh.left]
        if self.plan.quorum and draw.random() < 0.6:
            most = min(len(running), self.plan.peers - self.plan.quorum.min)
            self.dead = set(draw.sample(running, draw.randint(0, most)))
        mesh.mend(*mesh.cuts)
        for i in range(self.plan.peers):
            mesh.disks[i].is_full = False
            mesh.resume(i)
            if i in self.dead:
                mesh.crash(i)
            else:
                mesh.boot(i)


def main(arguments: list[str]) -> int:
    """Run the seeds named on the command line."""
    first, last = int(arguments[0]), int(arguments[-1])
    start, failed, events = time.perf_counter(), 0, 0
    for seed in range(first, last + 1):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except SimulationError as error:
            failed += 1
            print(error, flush=True)
        events += simulation.events
    seconds = time.perf_counter() - start
    print(f"{last + 1 - first} seeds, {failed} failed, {events} steps, {seconds:.1f} s")
    if first == last:
        print(simulation.plan, *simulation.sites, simulation.mesh.explain(), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
