"""``crad-mesh replay``: what a peer's barrier took in and decided, read back from its recorded events."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from crad_p2p.errors import DataError, UsageError
from peer.events import to_json
from peer.recorder import FILE, PREVIOUS, Step, replay

#: Of a decision's fields, those that say nothing.
_EMPTY: tuple[Any, ...] = ([], (), None)


def show(console: Console, path: Path, last: int | None) -> None:
    """Print the events with their decisions, and what the barrier said where that changed.

    Raises:
        UsageError: there is no recording.
        DataError: it is damaged, or does not replay to the decisions that it holds.
    """
    files = [path] if path.is_file() else [path / name for name in (PREVIOUS, FILE) if (path / name).exists()]
    if not files:
        raise UsageError(f"{path}: no {FILE} is there; give a peer's state directory, or the file itself")
    for file in files:
        steps: deque[Step] = deque(maxlen=last)
        count = 0
        wrong: Step | None = None
        try:
            for step in replay(file):
                steps.append(step)
                count += 1
                if not step.agrees:
                    wrong = step
                    break
        except (ValueError, OSError) as error:
            raise DataError(f"{file}: {error}; expected a recording of crad-peer") from None
        _print(console, steps)
        if wrong:
            raise DataError(
                f"{file}, line {wrong.line}: the recorded decisions are {_words(wrong.recorded)}, replayed they are "
                f"{_words(wrong.replayed)}; another version of the software recorded them, or the file was changed"
            )
        console.print(f"{file}: {count} events replay to the same decisions", highlight=False, soft_wrap=True)


def _print(console: Console, steps: deque[Step]) -> None:
    said = ""
    for step in steps:
        follows = f" -> {_words(step.replayed)}" if step.replayed else ""
        when = datetime.fromtimestamp(step.time, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        console.print(f"{when}Z  {_words([to_json(step.event)])}{follows}", highlight=False, soft_wrap=True)
        if step.explanation != said:
            said = step.explanation
            console.print(f"{'':26}[dim]{said}[/dim]", highlight=False, soft_wrap=True)


def _words(items: list[dict[str, Any]]) -> str:
    """``Announced peer 1 round 4, Train round 5 teachers [0, 1]``"""
    return ", ".join(" ".join([item["is"], *_fields(item)]) for item in items)


def _fields(item: dict[str, Any]) -> list[str]:
    return [f"{name} {value}" for name, value in item.items() if name != "is" and value not in _EMPTY]
