"""What this peer is doing, for Watch: kept in one place, sent on change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from peer._proto.crad.v1 import peer_pb2

#: Seconds between two messages that only report progress.
_MIN_INTERVAL = 0.2
#: Seconds after which an unchanged state is sent again; with many peers, to each of whom it is sent, up to twice that.
_HEARTBEAT = 10.0
#: Peers from which on it takes longer.
_MANY = 50


class Status:
    """The current :class:`PeerState`.

    Args:
        members: peers of the federation.
    """

    def __init__(self, members: int = 1) -> None:
        self._heartbeat = _HEARTBEAT * min(2.0, max(1.0, members / _MANY))
        self.state = peer_pb2.PeerState(round=-1, collected=-1, phase="start")
        self._version = 0
        self._watchers = 0
        self._followers: set[int] = set()
        self._closed = False
        self._changed, self._steered = _Signal(), _Signal()  # of whatever changes; of what others wait for

    def update(self, **fields: Any) -> None:
        """Set fields (None clears one) and wake the watchers."""
        with self._changing():
            for name, value in fields.items():
                if value is None:
                    self.state.ClearField(name)
                else:
                    setattr(self.state, name, value)

    def show_data(self, data: peer_pb2.Data) -> None:
        """The learner has loaded the data."""
        with self._changing():
            self.state.data.CopyFrom(data)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        before, steered = self.state.SerializeToString(), _steering(self.state)
        yield
        if self.state.SerializeToString() != before:
            self._version += 1
            self._changed.fire()
            if _steering(self.state) != steered:
                self._steered.fire()

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
                await self._steering_changed(_steering(state), _MIN_INTERVAL if progress else self._heartbeat)
                if progress:
                    await self._changed_since(version, self._heartbeat)
                if self._closed:
                    return
        finally:
            self._watchers -= 1
            self._changed.fire()

    def close(self) -> None:
        """End all streams, without a word of leaving: this peer stops, and will be back."""
        self._closed = True
        self._changed.fire()
        self._steered.fire()

    def follow(self, peer: int) -> None:
        """Another peer has begun to watch."""
        self._followers.add(peer)
        self._changed.fire()

    def is_followed_by(self, peer: int) -> bool:
        """Whether this peer has watched since the start."""
        return peer in self._followers

    async def followed_by(self, peers: Collection[int], seconds: float) -> None:
        """Wait until all these peers have watched since the start, at most so long."""
        await self._until(self._changed, lambda: self._followers.issuperset(peers), seconds)

    async def drained(self, seconds: float) -> bool:
        """Wait until no watcher is left, at most so long; whether none is."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        while self._watchers and (left := deadline - clock()) > 0:
            await self._changed.wait(left)
        return self._watchers == 0

    async def _steering_changed(self, before: tuple[int, int, bytes, bool], seconds: float) -> None:
        await self._until(self._steered, lambda: _steering(self.state) != before, seconds)

    async def _changed_since(self, version: int, seconds: float) -> None:
        await self._until(self._changed, lambda: self._version != version, seconds)

    async def _until(self, signal: _Signal, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for the condition, which is looked at after every signal, at most so long."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        while not condition() and not self._closed and (left := deadline - clock()) > 0:
            await signal.wait(left)


class _Signal:
    """Wakes all who wait. Of a hundred peers each has a hundred watchers, so they are not woken without a reason."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None  # done when it is fired

    def fire(self) -> None:
        fired, self._next = self._next, None
        if fired is not None:
            fired.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Until it is fired, at most so long.

        Not by ``asyncio.timeout``: one that expires just as its block ends leaves, before Python 3.13, a cancellation
        behind that hits the task at its next await, and a watcher would end without a word.
        """
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._next], timeout=seconds)


def _steering(state: peer_pb2.PeerState) -> tuple[int, int, bytes, bool]:
    return state.round, state.collected, state.data.SerializeToString(), state.leaving
