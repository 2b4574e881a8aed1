"""What was refused of other peers, counted by reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from crad_p2p.durable import write_file
from crad_p2p.foreign import printable

logger = logging.getLogger(__name__)

#: Different reasons and callers that are told apart; whoever invents more is counted under one.
_MOST = 200


class Refusals:
    """Counts by caller and reason; each kind is logged at its 1st, 10th, 100th… time, so that a flood is no flood here.

    Args:
        path: where the counts are written by :meth:`save`, one line a kind.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._path = path
        self._saved: dict[tuple[str, str], int] = {}
        self._measured: dict[tuple[str, str], Callable[[], int]] = {}

    def add(self, who: str, reason: str, detail: str = "") -> None:
        """Count one."""
        key = (who, reason)
        if key not in self.counts and len(self.counts) >= _MOST:
            key = ("others", "other reasons")
        self.counts[key] += 1
        number = self.counts[key]
        if str(number).strip("0") == "1":
            times = "" if number == 1 else f", for the {number:,}th time"
            said = f" ({printable(detail, 200)})" if detail else ""
            logger.warning("refused a call of %s: %s%s%s", who, reason, said, times)

    def measure(self, who: str, reason: str, count: Callable[[], int]) -> None:
        """Have something counted elsewhere written with the rest."""
        self._measured[who, reason] = count

    def total(self) -> int:
        """Of all kinds."""
        return self.counts.total()

    def save(self) -> None:
        """Write the counts, if there are new ones."""
        now = {**self.counts, **{key: number for key, count in self._measured.items() if (number := count())}}
        if self._path is None or self._saved == now:
            return
        self._saved = now
        lines = [f"{number:>10,}  {who}: {reason}\n" for (who, reason), number in sorted(now.items())]
        write_file(self._path, "".join(lines))
