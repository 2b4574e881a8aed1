"""How long a peer is waited for: from what it says and what is seen, and never for ever."""

from __future__ import annotations

import math

import pytest

from peer.deadlines import RoundTimes

GRACE = 5.0


def times(said: dict[int, list[float]], seen: dict[int, list[float]] | None = None) -> RoundTimes:
    known = RoundTimes()
    for peer, seconds in said.items():
        for each in seconds:
            known.say(peer, each)
    for peer, seconds in (seen or {}).items():
        for each in seconds:
            known.see(peer, each)
    return known


def test_nothing_is_known_of_a_peer_that_has_said_nothing() -> None:
    known = times({1: [3.0]}, {2: [4.0]})  # seen alone is too little: it may have been there before
    assert known.of(2) is None
    assert known.allowance(2, GRACE) is None


def test_a_peer_gets_twice_its_longest_recent_round_and_the_grace() -> None:
    assert times({1: [3.0, 7.0, 4.0]}).allowance(1, GRACE) == 2 * 7.0 + GRACE


def test_what_was_seen_counts_if_it_was_longer() -> None:
    assert times({1: [3.0]}, {1: [8.0, 2.0]}).of(1) == 8.0
    assert times({1: [3.0]}, {1: [2.0]}).of(1) == 3.0


def test_only_the_last_ten_rounds_are_recent() -> None:
    assert times({1: [50.0] + [3.0] * 9}).of(1) == 50.0
    assert times({1: [50.0] + [3.0] * 10}).of(1) == 3.0
    assert times({1: [3.0]}, {1: [50.0] + [3.0] * 10}).of(1) == 3.0


def test_a_peer_twenty_times_as_slow_is_believed() -> None:
    assert times({0: [1.0], 1: [1.0], 2: [20.0]}).of(2) == 20.0


@pytest.mark.parametrize("lie", [1e9, math.inf])
def test_a_liar_gets_thirty_times_the_median_at_most(lie: float) -> None:
    assert times({0: [1.0], 1: [2.0], 2: [lie]}).of(2) == 60.0
    assert times({0: [1.0], 2: [lie]}).of(2) == 30.0  # it is not half of its own judge
    assert times({0: [1.0], 1: [2.0], 2: [3.0], 3: [lie]}).of(3) == 60.0


def test_what_is_seen_is_bounded_too() -> None:
    """Who always comes just before its time is over would else get twice as much every round."""
    assert times({0: [1.0], 1: [2.0], 2: [2.0]}, {2: [1e9]}).of(2) == 60.0


def test_an_impossible_time_counts_as_none() -> None:
    assert times({1: [-3.0]}).of(1) == 0.0


def test_of_somebody_unknown_as_much_is_expected_as_of_the_slowest() -> None:
    assert times({}).common_allowance(GRACE) is None
    assert times({}, {1: [4.0]}).common_allowance(GRACE) is None
    assert times({0: [1.0], 1: [9.0], 2: [2.0]}).common_allowance(GRACE) == 2 * 9.0 + GRACE
