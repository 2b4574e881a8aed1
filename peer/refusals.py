"""What was refused of other peers and of strangers, counted by reason, and said so that a flood is no flood here."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from crad_p2p.durable import write_file
from crad_p2p.foreign import printable
from peer.quiet import Quiet

logger = logging.getLogger(__name__)

#: Different reasons and callers that are told apart; whoever invents more is counted under one.
_MOST = 200
#: Looks at a number counted elsewhere, at all of which something must have been there to be spoken of.
_LOOKS = 3


@dataclass
class _Measured:
    """Something that is counted elsewhere."""

    count: Callable[[], int]
    remedy: str
    said: int = 0
    looks: deque[int] = field(default_factory=lambda: deque(maxlen=_LOOKS))

    def lasting(self, number: int) -> int:
        """What was there at every one of the last looks: a number may fall again."""
        self.looks.append(number)
        return min(self.looks) if len(self.looks) == _LOOKS else 0


class Refusals:
    """Counts by caller and reason. What a member does is logged at its 1st, 10th, 100th… time, a stranger by address.

    Args:
        path: where the counts are written by :meth:`save`, one line a kind.

    Attributes:
        addresses: HOST:PORT from which each kind came last, where that is known.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.addresses: dict[tuple[str, str], str] = {}
        self._path = path
        self._saved: dict[tuple[str, str], int] = {}
        self._measured: dict[tuple[str, str], _Measured] = {}
        self._quiet = Quiet(clock, _MOST)

    def add(self, who: str, reason: str, detail: str = "") -> None:
        """Count one."""
        number = self.counts[self._counted(who, reason)]
        if str(number).strip("0") == "1":
            times = "" if number == 1 else f", for the {number:,}th time"
            said = f" ({printable(detail, 200)})" if detail else ""
            logger.warning("refused a call of %s: %s%s%s", who, reason, said, times)

    def add_stranger(self, who: str, address: str, reason: str, detail: str, remedy: str) -> None:
        """Count a call of somebody who must not call at all.

        Args:
            address: HOST:PORT from which it came.
            remedy: what to do about it.
        """
        key = self._counted(who, reason)
        self.addresses[key] = address
        if self._quiet.may_speak((*key, address.rpartition(":")[0])):
            so_far = f", {self.counts[key]:,} by now" if self.counts[key] > 1 else ""
            detail = printable(detail, 200)
            logger.warning("refused a call of %s at %s: %s (%s)%s; %s", who, address, reason, detail, so_far, remedy)

    def measure(self, who: str, reason: str, count: Callable[[], int], remedy: str) -> None:
        """Have something counted elsewhere written with the rest, and logged.

        Args:
            remedy: what that may be, and what to do about it.
        """
        self._measured[who, reason] = _Measured(count, remedy)

    def total(self) -> int:
        """Of all kinds."""
        return self.counts.total()

    def save(self) -> None:
        """Write the counts, if there are new ones. To be called every few seconds."""
        now = dict(self.counts)
        for (who, reason), measured in self._measured.items():
            if number := measured.count():
                now[who, reason] = number
            lasting = measured.lasting(number)
            if lasting > measured.said and self._quiet.may_speak((who, reason)):
                measured.said = lasting
                times = "once" if lasting == 1 else f"{lasting:,} times by now"
                logger.warning("%s %s, %s: %s", who, reason, times, measured.remedy)
        if self._path is None or self._saved == now:
            return
        self._saved = now
        lines = [f"{number:>10,}  {who}: {reason}\n" for (who, reason), number in sorted(now.items())]
        write_file(self._path, "".join(lines))

    def _counted(self, who: str, reason: str) -> tuple[str, str]:
        key = (who, reason)
        if key not in self.counts and len(self.counts) >= _MOST:
            key = ("others", "other reasons")
        self.counts[key] += 1
        return key
