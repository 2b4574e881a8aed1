"""``crad-mesh replay``: what a peer's barrier took in and decided, read back from its recorded events."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from crad_p2p.errors import DataError, UsageError
from peer.events import to_json
from peer.recorder import FILE, PREVIOUS, Damage, Start, Step, read

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
    damaged: list[str] = []
    for file in files:
        items: list[Step | Start | Damage] = []
        wrong: Step | None = None
        try:
            for item in read(file):
                items.append(item)
                if isinstance(item, Step) and not item.agrees:
                    wrong = item
                    break
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); expected a recording of crad-peer") from None
        _print(console, _last(items, last))
        if wrong:
            raise DataError(
                f"{file}, line {wrong.line}: the recorded decisions are {_words(wrong.recorded)}, replayed they are "
                f"{_words(wrong.replayed)}; another version of the software recorded them, or the file was changed"
            )
        count = sum(isinstance(item, Step) for item in items)
        console.print(f"{file}: {count} events replay to the same decisions", highlight=False, soft_wrap=True)
        damaged += [f"{file}, line {item.line} is {item.reason}" for item in items if isinstance(item, Damage)]
    if damaged:
        more = f" (and {len(damaged) - 1} more are damaged)" if len(damaged) > 1 else ""
        raise DataError(
            f"{damaged[0]}{more}; expected a recording of crad-peer, and what follows a damaged line, up to the next "
            f"start of the service, is left out; see to the disk"
        )


def _last(items: list[Step | Start | Damage], count: int | None) -> list[Step | Start | Damage]:
    """The last so many events, and what lies between them."""
    steps = [at for at, item in enumerate(items) if isinstance(item, Step)]
    return items if count is None or len(steps) <= count else items[steps[-count] :]


def _print(console: Console, items: list[Step | Start | Damage]) -> None:
    line = functools.partial(console.print, highlight=False, soft_wrap=True)
    said = ""
    for item in items:
        match item:
            case Step():
                follows = f" -> {_words(item.replayed)}" if item.replayed else ""
                line(f"{_when(item.time)}  {_words([to_json(item.event)])}{follows}")
                if item.explanation != said:
                    said = item.explanation
                    line(f"{'':26}[dim]{said}[/dim]")
            case Start() if not item.continues:
                line(f"{_when(item.time)}  [bold]the service was started[/bold]")
            case Damage():
                line(
                    f"{'':26}[bold]line {item.line} is damaged; what follows, up to the next start of the service, is "
                    f"left out[/bold]"
                )


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def _words(items: list[dict[str, Any]]) -> str:
    """``Announced peer 1 round 4, Train round 5 teachers [0, 1]``"""
    return ", ".join(" ".join([item["is"], *_fields(item)]) for item in items)


def _fields(item: dict[str, Any]) -> list[str]:
    return [
        f"{name} {value:.1f} s" if name == "busy" else f"{name} {value}"
        for name, value in item.items()
        if name != "is" and value not in _EMPTY
    ]
