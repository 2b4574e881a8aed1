"""Every event of the barrier with the decisions that followed, on file: for a post-mortem, and to replay it.

``events.jsonl`` has one JSON object a line. A start of the service, and a new file, begin with the barrier's whole
state and the time of day, in seconds since the epoch; each further line is an event, the time at which it was taken in,
and the decisions. At most two files are kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter

from peer.barrier import Barrier, Quorum, State
from peer.events import Decision, Event, Published, Tick, event_from_json, to_json

#: Bytes after which a new file begins: some sixty rounds of ten peers.
_MOST = 512 << 10
_STATE: TypeAdapter[State] = TypeAdapter(State)

FILE, PREVIOUS = "events.jsonl", "events.previous.jsonl"


class Recorder:
    """Writes what one barrier takes in and gives out. Not made durable: a power cut may cost the last lines.

    Args:
        folder: the state directory.
    """

    def __init__(self, folder: Path, barrier: Barrier) -> None:
        self._folder = folder
        self._barrier = barrier
        self._file: TextIO
        self._open()

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def record(self, now: float, event: Event, decisions: list[Decision]) -> None:
        """One event that has been taken in at ``now``."""
        line: dict[str, Any] = {"now": now, "event": to_json(event), "decisions": list(map(to_json, decisions))}
        if isinstance(event, Published):
            line["teachers"] = self._barrier.teachers
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._file.tell() > _MOST:  # at any event: a peer may wait for days, and is told of others all the time
            self._file.close()
            self._open()

    def _open(self) -> None:
        path = self._folder / FILE
        if path.exists() and path.stat().st_size > _MOST:
            path.replace(self._folder / PREVIOUS)
        self._file = path.open("a")
        if self._file.tell() and not _ends_a_line(path):  # the last start was killed while it wrote
            self._file.write("\n")
        barrier = self._barrier
        start = {
            "others": barrier.others,
            "rounds": barrier.rounds,
            "quorum": asdict(barrier.quorum) if barrier.quorum else None,
            "start_wait": barrier.start_wait,
            "teachers": barrier.teachers,
            "sources": barrier.sources,
            "state": _STATE.dump_python(barrier.state, mode="json"),
        }
        self._file.write(json.dumps({"start": start, "time": time.time()}) + "\n")
        self._file.flush()


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() == b"\n"


@dataclass(frozen=True)
class Step:
    """One replayed line: what came in, what was recorded, and what the barrier of now says.

    ``now`` is the monotonic clock's time in seconds, ``time`` the time of day, as far as it is known from the start.
    """

    line: int
    now: float
    time: float
    event: Event
    recorded: list[dict[str, Any]]
    replayed: list[dict[str, Any]]
    explanation: str

    @property
    def agrees(self) -> bool:
        """Whether the same events gave the same decisions."""
        return self.recorded == self.replayed


def replay(path: Path) -> Iterator[Step]:
    """Feed a recording to a barrier.

    Raises:
        ValueError: a line is no recording; names it. A last line without an end is left out: its writer was killed.
    """
    barrier: Barrier | None = None
    offset = 0.0
    teachers: dict[int, tuple[int, ...]] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            tree = json.loads(line)
        except ValueError:
            if number == len(lines) or b'"start"' in lines[number][:10]:  # half a line, then the end or a new start
                continue
            raise ValueError(f"line {number} is not JSON") from None
        try:
            if "start" in tree:
                barrier = _restore(tree["start"], teachers)
                offset = tree["time"] - barrier.state.now
                continue
            if barrier is None:
                raise ValueError("the file does not begin with a start")
            event = event_from_json(tree["event"])
            if isinstance(event, Published):
                teachers[event.round + 1] = tuple(tree["teachers"])
            decisions = barrier.step(Tick(tree["now"])) + barrier.step(event)
            replayed = json.loads(json.dumps(list(map(to_json, decisions))))
            now = tree["now"]
            step = Step(number, now, now + offset, event, tree["decisions"], replayed, barrier.explain())
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is not of a recording: {error}") from None
        yield step


def _restore(start: dict[str, Any], teachers: dict[int, tuple[int, ...]]) -> Barrier:
    state = _STATE.validate_python(start["state"], strict=False)
    teachers[state.published + 1], sources = tuple(start["teachers"]), tuple(start["sources"])
    barrier = Barrier(
        start["others"],
        start["rounds"],
        lambda number: teachers.get(number, sources),  # of rounds that are not recorded only their union matters
        state.published,
        quorum=Quorum(**start["quorum"]) if start["quorum"] else None,
        start_wait=start["start_wait"],
    )
    barrier.state = state
    return barrier
