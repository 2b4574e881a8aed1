"""What the log says when nothing changes for a while: what is waited for, and what stands in the way of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from crad_p2p.foreign import printable
from peer.quiet import Quiet
from peer.words import in_time

#: Seconds after which an unchanged situation is worth a line in the log.
LONG = 30.0


@dataclass(frozen=True)
class Way:
    """The way to one other peer, as it is now.

    Attributes:
        address: HOST:PORT, from the federation file.
        down_since: on the monotonic clock, when it is not connected; None when it is.
        reason: why it is not.
        calls_since: when it has begun to follow this peer, if that was after ``down_since``.
        is_busy: whether it is connected, and says that it works, or a snapshot is coming from it.
        says: what it says that it waits for, if it is connected.
    """

    address: str
    down_since: float | None
    reason: str = ""
    calls_since: float | None = None
    is_busy: bool = False
    says: str = ""


class Standstill:
    """Decides what is said, and how loud: at once after ``LONG`` seconds, and ever more rarely if it goes on.

    Args:
        file: of the federation, where addresses are.
    """

    def __init__(self, file: object, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._quiet = Quiet(clock)
        self._explanation, self._since = "", clock()

    def look(self, explanation: str, waited_for: Collection[int], ways: Mapping[int, Way]) -> Iterator[tuple[int, str]]:
        """Levels of logging and sentences that are due now.

        Args:
            explanation: what this peer waits for, or does.
            waited_for: the other peers that it waits for.
            ways: to all others, by id.
        """
        now = self._clock()
        for peer, way in ways.items():
            if way.calls_since is None or now - way.calls_since < LONG:  # before that it may not have been there
                continue
            if self._quiet.may_speak(("one way", peer)):
                yield (
                    logging.WARNING,
                    f"peer {peer} calls here, and has not been reached at {way.address} for "
                    f"{in_time(now - way.calls_since)} ({way.reason}): see to its address in {self._file}, and to "
                    f"the firewalls between",
                )
        if explanation != self._explanation:
            self._explanation, self._since = explanation, now
        elif now - self._since >= LONG:
            whom = {peer: ways[peer] for peer in waited_for}
            is_harmless = all(way.is_busy for way in whom.values())
            if not self._quiet.may_speak(("no change", explanation, self._since, is_harmless)):
                return
            said = [f"no change for {in_time(now - self._since)}: {explanation}"]
            said += [_stands_in_the_way(peer, way) for peer, way in whom.items() if not way.is_busy]
            yield logging.INFO if is_harmless else logging.WARNING, "; ".join(filter(None, said))


def _stands_in_the_way(peer: int, way: Way) -> str:
    if way.down_since is not None:
        return f"peer {peer} at {way.address}: {way.reason or 'no connection yet'}"
    return f"peer {peer} says: {printable(way.says, 200)}" if way.says else ""
