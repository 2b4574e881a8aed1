"""An explanation in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crad_p2p.explanation import ClassExplanation, Opinion, largest, top
from launch.explain.command import Found

#: Characters that a table may take where no terminal limits it.
_WIDE: Final = 1_000
_SHOWN: Final = 3


def print_found(console: Console, found: Found) -> None:
    """Print it all."""
    if not console.is_terminal:
        console.width = _WIDE
    for line in _head(found):
        _say(console, line)
    console.print(_teachers(found))
    explanation = found.explanation
    mass = f" (mass {explanation.mass:.2f} before it was renormalised)" if explanation.has_filter else ""
    _say(console, f"Target:  {_tops(found, explanation.target)}{mass}")
    _say(console, f"Student: {_tops(found, found.student.posterior)}")
    for note in found.notes:
        _say(console, f"\n{note}")
    console.print()  # each table ends with an empty line
    for label, reasons in found.labels.items():
        each = explanation.classes[label]
        _say(console, _title(found, label, reasons, each), "bold")
        if each.consensus is not None and each.threshold is not None:
            _say(console, f"Consensus {each.consensus:.2f}, median deviation {each.threshold:.2f}.")
        if each.note is not None:
            _say(console, each.note)
        console.print(_opinions(each, has_filter=explanation.has_filter))


def _head(found: Found) -> list[str]:
    method, picture = found.federation.method, found.picture
    truth = "its class is not known" if picture.truth is None else f"true class {found.name_of(picture.truth)}"
    hits = " Hits: validation images of the class that a teacher recognised, of those it has."
    return [
        f"{picture.name}: {truth}.",
        f"Method {method.name}, round {found.round} of {found.federation.rounds}. The student is peer "
        f"{found.student.peer}, {found.student.arch}.",
        f"Probabilities are at temperature {method.temperature:g}, as targets are made; models computed in float32."
        + (hits if found.explanation.has_filter else ""),
    ]


def _teachers(found: Found) -> Table:
    table = _table()
    for heading in ("teacher", "architecture", "top class"):
        table.add_column(heading, no_wrap=True)
    table.add_column("probability", justify="right", no_wrap=True)
    for each in found.teachers:
        label = top(each.posterior)
        table.add_row(f"peer {each.peer}", each.arch, Text(found.name_of(label)), _fraction(each.posterior[label]))
    return table


def _title(found: Found, label: int, reasons: Sequence[str], each: ClassExplanation) -> str:
    why = f", {' and '.join(reasons)}" if reasons else ""
    return f"Class {found.name_of(label)}{why}: {each.target:.2f} of the target"


def _opinions(each: ClassExplanation, *, has_filter: bool) -> Table:
    table = _table()
    has_archs = any(opinion.arch for opinion in each.opinions)
    columns: list[tuple[str, Literal["left", "right"]]] = [("teacher", "left")]
    columns += [("architecture", "left")] if has_archs else []
    columns += [("hits", "right")] if has_filter else []
    columns += [("prob.", "right")]
    columns += [("dev.", "right")] if has_filter else []
    columns += [("weight", "right")]
    for heading, justify in columns:
        table.add_column(heading, justify=justify, no_wrap=True)
    if has_filter:
        table.add_column("verdict")
    for opinion in each.opinions:
        cells = [opinion.voice]
        cells += [opinion.arch or ""] if has_archs else []
        cells += [f"{opinion.hits}/{opinion.counts}"] if has_filter else []
        cells += [_fraction(opinion.probability)]
        cells += [_fraction(opinion.deviation)] if has_filter else []
        cells += [_weight(opinion)]
        cells += [opinion.verdict] if has_filter else []
        table.add_row(*cells, style=None if opinion.kept else "dim")
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _tops(found: Found, values: Sequence[float]) -> str:
    return ", ".join(f"{found.name_of(label)} {values[label]:.2f}" for label in largest(values, _SHOWN))


def _weight(opinion: Opinion) -> str:
    return f"{100 * opinion.weight:.1f} %" if opinion.kept else "–"


def _fraction(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _say(console: Console, text: str, style: Any = None) -> None:
    console.print(text, style=style, highlight=False, markup=False)
