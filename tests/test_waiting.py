"""The time limit: results, errors, the limit itself, and cancellations that must never be lost."""

from __future__ import annotations

import asyncio

import pytest

from peer.waiting import to_the_end, within


def test_result_and_error_of_the_work_come_through() -> None:
    async def succeed() -> int:
        return 7

    async def fail() -> None:
        raise ValueError("no")

    assert asyncio.run(within(5, succeed())) == 7
    with pytest.raises(ValueError, match="no"):
        asyncio.run(within(5, fail()))


def test_work_that_takes_too_long_is_cancelled() -> None:
    cancelled = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await within(0.01, work())
        await asyncio.sleep(0)

    asyncio.run(main())
    assert cancelled == [True]


@pytest.mark.parametrize("steps", range(8))
def test_a_cancellation_just_as_the_work_ends_is_not_lost(steps: int) -> None:
    """Cancel after every possible number of turns of the loop since the work could end."""

    async def main() -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            await ready

        task = asyncio.ensure_future(within(60, work()))
        await asyncio.sleep(0.01)
        ready.set_result(None)
        for _ in range(steps):
            await asyncio.sleep(0)
        asked = task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == asked

    asyncio.run(main())


def test_work_is_waited_for_even_when_cancelled() -> None:
    async def main() -> None:
        go, done = asyncio.Event(), []

        async def work() -> None:
            await go.wait()
            done.append(True)

        task = asyncio.ensure_future(to_the_end(work()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        go.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert done == [True]

    asyncio.run(main())


def test_work_that_nobody_disturbs() -> None:
    async def work() -> int:
        return 7

    assert asyncio.run(to_the_end(work())) == 7
