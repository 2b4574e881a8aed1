"""Every event of the barrier with the decisions that followed, on file: for a post-mortem, and to replay it.

``events.jsonl`` has one JSON object a line. A start of the service, and a new file, begin with the barrier's whole
state, the time of day, in seconds since the epoch, and whether the file goes on where another ended; each further line
is an event, the time at which it was taken in, and the decisions. At most two files are kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter

from crad_p2p.participation import Part, drawn_schedule
from peer.barrier import Barrier, Quorum, State
from peer.events import Decision, Event, Published, Tick, event_from_json, to_json

#: Bytes after which a new file begins: some sixty rounds of ten peers.
_MOST = 512 << 10
#: More than anybody has time for; a damaged number must not keep a replay busy.
_MOST_ROUNDS = 1_000_000
_MOST_DRAWS = 10_000_000
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
        self._published = barrier.published
        self._file: TextIO
        self._open(continues=False)

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def record(self, now: float, event: Event, decisions: list[Decision]) -> None:
        """One event that has been taken in at ``now``."""
        line: dict[str, Any] = {"now": now, "event": to_json(event), "decisions": list(map(to_json, decisions))}
        last = self._barrier.published
        if isinstance(event, Published) or last != self._published:
            line["teachers"] = self._barrier.teachers
            if not (isinstance(event, Published) and last == event.round):
                line["passed"] = last
        self._published = last
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._file.tell() > _MOST:  # at any event: a peer may wait for days, and is told of others all the time
            self._file.close()
            self._open(continues=True)

    def _open(self, *, continues: bool) -> None:
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
        if barrier.part is not None:
            drawn = barrier.part.schedule
            start["participation"] = {"me": barrier.part.me, "seed": drawn.seed, "active": drawn.size}
        self._file.write(json.dumps({"start": start, "time": time.time(), "continues": continues}) + "\n")
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


@dataclass(frozen=True)
class Start:
    """The service was started here, ``time`` of day; or a new file ``continues`` the one before."""

    line: int
    time: float
    continues: bool


@dataclass(frozen=True)
class Damage:
    """A line that is none of a recording, and why; nothing is known of what follows up to the next start."""

    line: int
    reason: str


def read(path: Path) -> Iterator[Step | Start | Damage]:
    """Feed a recording to a barrier, as far as it is whole.

    A last line without an end is left out: its writer was killed.
    """
    barrier: Barrier | None = None
    damaged = False
    offset = 0.0
    teachers: dict[int, tuple[int, ...]] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line or (damaged and not _starts(line)):
            continue
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) or _starts(lines[number]):  # half a line, then the end or a new start
                continue
            damaged = True
            yield Damage(number, "not JSON")
            continue
        try:
            if "start" in tree:
                barrier = _restore(tree["start"], teachers)
                offset = tree["time"] - barrier.state.now
                item: Step | Start = Start(number, _time(tree["time"]), tree.get("continues", False))
            elif barrier is None:
                raise ValueError("the file does not begin with a start")
            else:
                event = event_from_json(tree["event"])
                if "teachers" in tree:
                    last = tree["passed"] if "passed" in tree else tree["event"]["round"]
                    teachers[last + 1] = tuple(tree["teachers"])
                decisions = barrier.step(Tick(tree["now"])) + barrier.step(event)
                replayed = json.loads(json.dumps(list(map(to_json, decisions))))
                recorded = [{"is": each["is"], **each} for each in tree["decisions"]]
                now = tree["now"]
                item = Step(number, now, _time(now + offset), event, recorded, replayed, barrier.explain())
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
            damaged = True
            yield Damage(number, f"not of a recording: {' '.join(str(error).split())}")
        else:
            damaged = False
            yield item


def replay(path: Path) -> Iterator[Step]:
    """The steps of a recording that is whole.

    Raises:
        ValueError: a line is no recording; names it.
    """
    for item in read(path):
        if isinstance(item, Damage):
            raise ValueError(f"line {item.line} is {item.reason}")
        if isinstance(item, Step):
            yield item


def _starts(line: bytes) -> bool:
    return b'"start"' in line[:10]


def _time(seconds: float) -> float:
    """Checked to be one that can be shown."""
    datetime.fromtimestamp(seconds, UTC)
    return seconds


def _restore(start: dict[str, Any], teachers: dict[int, tuple[int, ...]]) -> Barrier:
    state = _STATE.validate_python(start["state"], strict=False)
    if not 0 < start["rounds"] <= _MOST_ROUNDS:
        raise ValueError(f"{start['rounds']} rounds")
    teachers[state.published + 1], sources = tuple(start["teachers"]), tuple(start["sources"])
    part = None
    if (drawn := start.get("participation")) is not None:
        ids = tuple(sorted({drawn["me"], *start["others"]}))
        if len(ids) * start["rounds"] > _MOST_DRAWS:
            raise ValueError(f"{start['rounds']} rounds of {len(ids)} peers")
        part = Part(drawn_schedule(ids, start["rounds"], drawn["seed"], drawn["active"]), drawn["me"])

    def teachers_of(number: int) -> tuple[int, ...]:
        """Of rounds that are not recorded only their union matters."""
        return () if part is not None and not part.is_active(number) else teachers.get(number, sources)

    barrier = Barrier(
        start["others"],
        start["rounds"],
        teachers_of,
        state.published,
        quorum=Quorum(**start["quorum"]) if start["quorum"] else None,
        start_wait=start["start_wait"],
        part=part,
    )
    barrier.state = state
    return barrier
