"""Many seeds of the simulated mesh, and what the simulation must be able to find.

``MESH_SEEDS=5000:9000`` runs other seeds; ``python tests/mesh_simulation.py 5000 9000`` does so without pytest.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from mesh_simulation import Simulation, SimulationError
from planted_faults import (
    CreditingBarrier,
    FickleBarrier,
    HastyBarrier,
    HurriedBarrier,
    LeapingBarrier,
    LenientBarrier,
    PatientBarrier,
    SelfishBarrier,
)

from peer.barrier import Quorum
from peer.events import GiveUp, Gone, LearnerDown, Rejoin, Train

_FIRST, _LAST = (int(number) for number in os.environ.get("MESH_SEEDS", "0:999").split(":"))
_BATCH = 100


@pytest.mark.parametrize("first", range(_FIRST, _LAST + 1, _BATCH))
def test_seeds(first: int) -> None:
    for seed in range(first, min(first + _BATCH, _LAST + 1)):
        Simulation(seed).run()


def partial(seed: int, **fault: Any) -> Simulation:
    """Some peers of three to seven take part in a round; the policy is all where the seed is even."""
    peers = 3 + seed // 2 % 5
    active = 2 + seed // 10 % (peers - 1)
    return Simulation(seed, peers=peers, active=active, draw=seed, rounds=3 + seed // 4 % 8, teaching={}, **fault).run()


def test_seeds_with_partial_participation() -> None:
    finished = 0
    for seed in range(0, 60, 2):
        mesh = partial(seed).mesh
        finished += all(map(mesh.is_done, range(mesh.plan.peers)))
    assert finished >= 15


def test_a_peer_that_runs_ahead_is_found() -> None:
    found = ""
    for seed in range(0, 400, 2):
        try:
            partial(seed, barrier=SelfishBarrier)
        except SimulationError as error:
            found = str(error)
            break
    assert re.search("after|more than one round apart", found), found


def test_equal_seeds_give_equal_runs() -> None:
    for seed in range(20):
        one, other = Simulation(seed).run(), Simulation(seed).run()
        assert one.events == other.events, f"seed {seed}"
        assert [service.recording for service in one.mesh.all_services] == [
            service.recording for service in other.mesh.all_services
        ], f"seed {seed}"


def test_where_nothing_fails_everybody_finishes_with_everybody() -> None:
    for seed in range(2, 200, 4):  # policy all, liveness
        simulation = Simulation(seed)
        simulation.fault_every, simulation.loss, simulation.late = math.inf, 0.0, 0.0
        simulation.run()
        digests = {key: snapshot.digest for key, snapshot in simulation.mesh.laws.published.items()}
        assert digests == simulation.plan.undisturbed(), f"seed {seed}"


def test_everything_that_may_happen_does_happen() -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        simulation = Simulation(seed).run()
        kind = f"{simulation.policy}, {simulation.mode}"
        mesh, peers = simulation.mesh, range(simulation.plan.peers)
        seen[f"{kind}: finished"] += all(map(mesh.is_done, peers))
        seen[f"{kind}: cut short"] += not all(map(mesh.is_done, peers))
        seen["dead"] += bool(simulation.dead)
        seen["restarted"] += len(mesh.all_services) > len(peers)
        for service in mesh.all_services:
            seen["learner lost"] += any(isinstance(event, LearnerDown) for event in service.recording)
            seen["gone"] += any(isinstance(event, Gone) for event in service.recording)
            for decision in service.decisions:
                match decision:
                    case Rejoin():
                        seen["rejoined"] += 1
                    case GiveUp():
                        seen[f"{simulation.policy}: given up"] += 1
                    case Train():
                        seen["missing"] += bool(decision.missing)
                        seen["stale"] += bool(decision.stale)
                        seen["quarantined"] += bool(decision.quarantined)
    kinds = [f"{policy}, {mode}" for policy in ("all", "quorum") for mode in ("safety", "liveness")]
    expected = [f"{kind}: finished" for kind in kinds] + [
        f"{kind}: cut short" for kind in kinds if kind != "all, liveness"
    ]
    expected += ["dead", "restarted", "learner lost", "gone", "rejoined", "all: given up", "quorum: given up"]
    expected += ["missing", "stale", "quarantined"]
    assert [what for what in expected if seen[what] < 5] == [], seen


@pytest.mark.parametrize(
    ("policy", "fault", "message"),
    [
        ("all", {"barrier": HastyBarrier}, "after"),
        ("quorum", {"barrier": CreditingBarrier, "quorum": Quorum(3, 2, 1.0), "peers": 5}, "after"),
        ("quorum", {"barrier": LeapingBarrier}, "without having seen it"),
        ("quorum", {"barrier": LenientBarrier}, "with Snapshot"),
        ("quorum", {"barrier": PatientBarrier}, "never done are"),
        ("quorum", {"barrier": HurriedBarrier}, "has met only"),
        ("quorum", {"barrier": FickleBarrier}, "after"),
        ("quorum", {"quorum": Quorum(2, 2, 1.0), "peers": 4}, "after|has met only"),
    ],
    ids=["one missing", "counts the absent", "leaps", "anything old", "no deadline", "hurried", "fickle", "half"],
)
def test_planted_faults_are_found(policy: str, fault: dict[str, Any], message: str) -> None:
    found = first_failure(range(policy == "quorum", 4000, 2), **fault)
    assert re.search(message, found.splitlines()[0]), found
    assert re.match(r"seed \d+ ", found)


def first_failure(seeds: Iterable[int], **fault: Any) -> str:
    """What the first of these seeds says that shows the fault."""
    for seed in seeds:
        try:
            Simulation(seed, **fault).run()
        except SimulationError as error:
            return str(error)
    return "no seed shows it"
