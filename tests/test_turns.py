"""Whose transfer comes next."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from wire import in_loop

from peer.turns import Slots, Turns


async def settled() -> None:
    """All tasks have come to where they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


class Holder:
    """A task that holds what it was given until it is told to let go."""

    def __init__(self, what: Any) -> None:
        self.has_it = False
        self.done = asyncio.Event()
        self.task = asyncio.create_task(self._hold(what))

    async def _hold(self, what: Any) -> None:
        async with what:
            self.has_it = True
            await self.done.wait()
        self.has_it = False


@in_loop
async def test_one_at_a_time_and_the_newest_round_first() -> None:
    turns = Turns()
    running = Holder(turns.take(3))
    await settled()
    waiting = {number: Holder(turns.take(number)) for number in (4, 6, 5)}
    for number in (6, 5, 4):
        await settled()
        assert running.has_it
        assert not any(each.has_it for each in waiting.values())
        running.done.set()
        running = waiting.pop(number)
    await settled()
    assert running.has_it
    running.done.set()


@in_loop
async def test_one_that_no_longer_waits_is_passed_over() -> None:
    turns = Turns()
    first = Holder(turns.take(1))
    await settled()
    second, third = Holder(turns.take(3)), Holder(turns.take(2))
    await settled()
    second.task.cancel()
    await settled()
    first.done.set()
    await settled()
    assert (second.has_it, third.has_it) == (False, True)
    third.done.set()
    await third.task
    async with turns.take(0):  # nobody holds it any more
        pass


@in_loop
async def test_those_who_are_cancelled_together_with_the_holder_are_passed_over() -> None:
    turns = Turns()
    tasks = [Holder(turns.take(number)).task for number in (1, 3)]
    await settled()
    for task in tasks:  # in one go, as when a round is over: the second does not know yet when the first lets go
        task.cancel()
    await settled()
    assert all(task.cancelled() for task in tasks)
    async with turns.take(2):  # nobody holds it any more
        pass


@in_loop
async def test_a_turn_that_comes_as_its_owner_ends_is_passed_on() -> None:
    turns = Turns()
    first = Holder(turns.take(1))
    await settled()
    second, third = Holder(turns.take(3)), Holder(turns.take(2))
    await settled()
    first.done.set()
    while not second.has_it and not second.task.cancelling():
        await asyncio.sleep(0)
        if turns._waiting and len(turns._waiting) == 1:  # the second has been given it, and does not know yet
            second.task.cancel()
    await settled()
    assert second.task.cancelled()
    assert third.has_it
    third.done.set()


@in_loop
async def test_slots_are_few_but_a_slow_one_gives_its_slot_back() -> None:
    slots = Slots(2, 0.05)
    slow = [Holder(slots.take(peer)) for peer in (0, 1)]
    await settled()
    others = [Holder(slots.take(peer)) for peer in (2, 3, 4)]
    await settled()
    assert [each.has_it for each in slow + others] == [True, True, False, False, False]
    while not all(each.has_it for each in others[:2]):
        await asyncio.sleep(0.01)
    assert all(each.has_it for each in slow)
    for each in slow + others:
        each.done.set()
    await asyncio.gather(*(each.task for each in slow + others))
    # As many are free as at the beginning, and no more.
    again = [Holder(slots.take(peer)) for peer in (5, 6, 7)]
    await settled()
    assert [each.has_it for each in again] == [True, True, False]
    for each in again:
        each.done.set()


@in_loop
async def test_who_was_slow_needs_no_slot_until_it_is_fast_again() -> None:
    slots = Slots(1, 0.02)
    async with slots.take(0):
        await asyncio.sleep(0.05)
    fast = Holder(slots.take(1))
    await settled()
    with pytest.raises(OSError, match="cut"):
        async with slots.take(0):  # beside the other one; how fast it would have been is not known
            raise OSError("cut")
    async with slots.take(0):
        pass
    waiting = Holder(slots.take(0))
    await settled()
    assert (fast.has_it, waiting.has_it) == (True, False)
    fast.done.set()
    await settled()
    assert waiting.has_it
    waiting.done.set()


@pytest.mark.parametrize("count", [1, 3])
def test_a_fast_one_gives_its_slot_back_once(count: int) -> None:
    @in_loop
    async def run() -> None:
        slots = Slots(count, 0.02)
        for _ in range(4):
            async with slots.take(0):
                pass
        await asyncio.sleep(0.05)  # longer than any of them could have held it
        holders = [Holder(slots.take(peer)) for peer in range(count + 1)]
        await settled()
        assert [each.has_it for each in holders] == [True] * count + [False]
        for each in holders:
            each.done.set()

    run()


@in_loop
async def test_those_who_were_slow_may_be_limited_too() -> None:
    slots = Slots(2, 0.02, slow=1)
    for peer in (1, 2, 3):
        async with slots.take(peer):
            await asyncio.sleep(0.05)
    holders = [Holder(slots.take(peer)) for peer in (1, 2, 3, 4)]
    await settled()
    assert [each.has_it for each in holders] == [True, False, False, True]  # the fourth was not slow
    holders[0].done.set()
    await settled()
    assert [each.has_it for each in holders] == [False, True, False, True]
    for each in holders:
        each.done.set()
    await asyncio.gather(*(each.task for each in holders))
