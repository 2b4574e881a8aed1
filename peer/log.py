"""One line an event, as text for people or JSON for programs, on standard error."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

from crad_p2p.foreign import printable

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "taskName"}


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a caller has gone in the middle of a stream: gRPC logs it as an error, with a traceback, each time."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")


class Bounded(logging.Filter):
    """Lets no line of the program write more than a disk bears, whatever another peer makes happen how often.

    Each has its first thousand lines, and one more every five seconds: some five megabytes a day.
    """

    _BURST, _SECONDS = 1_000, 5.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._known: dict[tuple[str, int], tuple[float, float, int]] = {}  # lines to go, as of when, and left out

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written."""
        now, place = self._clock(), (record.pathname, record.lineno)
        left, since, dropped = self._known.get(place, (float(self._BURST), now, 0))
        left = min(float(self._BURST), left + (now - since) / self._SECONDS)
        if left < 1:
            self._known[place] = left, now, dropped + 1
            return False
        self._known[place] = left - 1, now, 0
        if dropped:
            record.msg, record.args = f"{record.getMessage()} ({dropped:,} lines like this were left out)", ()
        return True


class TextFormatter(logging.Formatter):
    """Time (UTC), peer id, level and message in one line, whatever is in the message; tracebacks below it.

    Texts of others are made printable where they come in. This is for those that come from libraries.
    """

    def __init__(self, peer_id: int) -> None:
        super().__init__(f"%(asctime)sZ peer {peer_id} %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        line = super().formatMessage(record)
        return printable(line, len(line))


class JsonFormatter(logging.Formatter):
    """Time (seconds since the epoch), peer id, level, message, and whatever was passed as ``extra``."""

    def __init__(self, peer_id: int) -> None:
        super().__init__()
        self._peer_id = peer_id

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        line = {
            "time": round(record.created, 3),
            "peer": self._peer_id,
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **extra,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(log_format: str, peer_id: int) -> None:
    """Set up logging of this process."""
    handler = logging.StreamHandler()
    handler.addFilter(_is_news)
    handler.addFilter(Bounded())
    handler.setFormatter(JsonFormatter(peer_id) if log_format == "json" else TextFormatter(peer_id))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
