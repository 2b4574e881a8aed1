"""What this peer is doing, for Watch: kept in one place, sent on change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from peer._proto.crad.v1 import peer_pb2

#: Seconds between two messages that only report progress.
_MIN_INTERVAL = 0.2
#: Seconds after which an unchanged state is sent again.
_HEARTBEAT = 10.0


class Status:
    """The current :class:`PeerState`."""

    def __init__(self) -> None:
        self.state = peer_pb2.PeerState(round=-1, collected=-1, phase="start")
        self._version = 0
        self._watchers = 0
        self._followers: set[int] = set()
        self._closed = False
        self._changed: asyncio.Future[None] | None = None  # done at the next change, for those who wait

    def update(self, **fields: Any) -> None:
        """Set fields (None clears one) and wake the watchers."""
        before = self.state.SerializeToString()
        for name, value in fields.items():
            if value is None:
                self.state.ClearField(name)
            else:
                setattr(self.state, name, value)
        if self.state.SerializeToString() != before:
            self._version += 1
            self._wake()

    def show_data(self, data: peer_pb2.Data) -> None:
        """The learner has loaded the data."""
        if self.state.data != data:
            self.state.data.CopyFrom(data)
            self._version += 1
            self._wake()

    async def watch(self, *, progress: bool) -> AsyncIterator[peer_pb2.PeerState]:
        """The state now and after a change; ends after the state with ``leaving`` set.

        Args:
            progress: report every change, not too often, and not only what others wait for.
        """
        self._watchers += 1
        try:
            while True:
                version, state = self._version, peer_pb2.PeerState()
                state.CopyFrom(self.state)
                yield state
                if state.leaving or self._closed:
                    return
                await self._steering_changed(_steering(state), _MIN_INTERVAL if progress else _HEARTBEAT)
                if progress:
                    await self._changed_since(version, _HEARTBEAT)
                if self._closed:
                    return
        finally:
            self._watchers -= 1
            self._wake()

    def close(self) -> None:
        """End all streams, without a word of leaving: this peer stops, and will be back."""
        self._closed = True
        self._wake()

    def follow(self, peer: int) -> None:
        """Another peer has begun to watch."""
        self._followers.add(peer)
        self._wake()

    def is_followed_by(self, peer: int) -> bool:
        """Whether this peer has watched since the start."""
        return peer in self._followers

    async def followed_by(self, peers: Collection[int], seconds: float) -> None:
        """Wait until all these peers have watched since the start, at most so long."""
        await self._until(lambda: self._followers.issuperset(peers), seconds)

    async def drained(self, seconds: float) -> bool:
        """Wait until no watcher is left, at most so long; whether none is."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        while self._watchers and (left := deadline - clock()) > 0:
            await self._wait_for_change(left)
        return self._watchers == 0

    async def _steering_changed(self, before: tuple[int, int, bytes, bool], seconds: float) -> None:
        await self._until(lambda: _steering(self.state) != before, seconds)

    async def _changed_since(self, version: int, seconds: float) -> None:
        await self._until(lambda: self._version != version, seconds)

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for the condition, at most so long.

        Not by ``asyncio.timeout``: one that expires just as its block ends leaves, before Python 3.13, a cancellation
        behind that hits the task at its next await, and a watcher would end without a word.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        while not condition() and not self._closed and (left := deadline - clock()) > 0:
            await self._wait_for_change(left)

    async def _wait_for_change(self, seconds: float) -> None:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._changed], timeout=seconds)


def _steering(state: peer_pb2.PeerState) -> tuple[int, int, bytes, bool]:
    return state.round, state.collected, state.data.SerializeToString(), state.leaving
