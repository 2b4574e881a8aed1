"""When a peer that has finished leaves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from peer.leaving import RETURN, Leaving, Verdict

LINGER = 60.0
NOTHING: dict[str, Any] = {"late": (), "wanted": (), "connected": (1, 2), "moved": 0}


def ending(*, had_finished: bool = False, linger: float = LINGER) -> Leaving:
    return Leaving(100.0, linger, had_finished=had_finished)


def test_one_whom_nobody_needs_leaves_at_once() -> None:
    assert ending().look(100.0, **NOTHING) is Verdict.LEAVE


def test_one_that_is_needed_stays_for_the_linger_time() -> None:
    leaving, late = ending(), {**NOTHING, "late": (2,)}
    assert leaving.look(100.0, **late) is Verdict.STAY
    assert leaving.wake_at(100.0) == 160.0
    assert leaving.look(159.9, **late) is Verdict.STAY
    assert leaving.look(160.0, **late) is Verdict.TIME_IS_OVER
    assert leaving.look(159.0, **NOTHING) is Verdict.LEAVE


def test_the_linger_time_counts_from_the_last_byte_that_moved() -> None:
    leaving, late = ending(), {**NOTHING, "late": (2,)}
    assert leaving.look(100.0, **late | {"moved": 5_000}) is Verdict.STAY  # before it finished
    assert leaving.wake_at(100.0) == 160.0
    assert leaving.look(150.0, **late | {"moved": 6_000}) is Verdict.STAY
    assert leaving.look(209.9, **late | {"moved": 6_000}) is Verdict.STAY
    assert leaving.look(210.0, **late | {"moved": 6_000}) is Verdict.TIME_IS_OVER


@pytest.mark.parametrize("connected", [(1,), (1, 2)])
def test_copies_that_may_come_are_waited_for(connected: tuple[int, ...]) -> None:
    leaving, wanting = ending(), {**NOTHING, "wanted": (1,), "connected": connected}
    assert leaving.look(150.0, **wanting) is Verdict.STAY
    assert not leaving.gave_up
    assert leaving.look(160.0, **wanting) is Verdict.TIME_IS_OVER


def test_copies_whose_owners_are_out_of_reach_are_given_up() -> None:
    leaving, cut_off = ending(), {**NOTHING, "wanted": (1,), "connected": (2,)}
    assert leaving.look(100.0, **cut_off) is Verdict.STAY
    assert leaving.wake_at(100.0) == 100.0 + RETURN
    assert leaving.look(102.0, **cut_off | {"connected": (1, 2)}) is Verdict.STAY  # for a moment only
    assert leaving.wake_at(102.0) == 160.0
    assert leaving.look(103.0, **cut_off) is Verdict.STAY
    assert leaving.look(103.0 + RETURN, **cut_off | {"late": (1,)}) is Verdict.STAY
    assert leaving.gave_up  # the others can be told, though this peer stays
    assert leaving.look(104.0 + RETURN, **cut_off) is Verdict.LEAVE


def test_one_that_had_finished_stays_a_little_for_those_who_lost_their_disk() -> None:
    leaving = ending(had_finished=True)
    assert leaving.look(100.0, **NOTHING) is Verdict.STAY
    assert leaving.wake_at(100.0) == 100.0 + RETURN
    assert leaving.look(103.0, **NOTHING | {"moved": 1}) is Verdict.STAY
    assert leaving.look(100.0 + RETURN, **NOTHING | {"moved": 1}) is Verdict.STAY  # who came has been fetching
    assert leaving.look(103.0 + RETURN, **NOTHING | {"moved": 1}) is Verdict.LEAVE
    assert ending(had_finished=True, linger=0.0).look(100.0, **NOTHING) is Verdict.LEAVE


def test_there_may_be_nothing_to_wake_for() -> None:
    assert ending().wake_at(1000.0) == math.inf
