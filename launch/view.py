"""What a person sees while a federation runs, and at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from crad_p2p.federation import Federation
from crad_p2p.results import RoundRecord, Summary, mean

_PHASES = {
    "start": "starting",
    "images": "reading images",
    "recover": "recovering",
    "wait": "waiting",
    "teachers": "teachers",
    "train": "distilling",
    "validate": "validating",
    "evaluate": "testing",
    "linger": "serving others",
    "done": "done",
}


@dataclass
class Row:
    """One peer in the table."""

    peer: int
    arch: str
    round: int = -1
    phase: str = "start"
    step: int = 0
    steps: int = 0
    validation_accuracy: float | None = None
    global_accuracy: float | None = None


class Progress:
    """Live table on a terminal; elsewhere one line a round."""

    def __init__(self, console: Console, federation: Federation) -> None:
        self.rows = {peer_id: Row(peer_id, federation.peer(peer_id).arch) for peer_id in federation.ids}
        self._console = console
        self._federation = federation
        self._start = time.monotonic()
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=5, transient=True)
        self._reported = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, highlight=False)

    def drop(self, peer: int) -> None:
        """Show a peer no more. Another thread may be drawing the rows, so they are not changed but replaced."""
        self.rows = {each: row for each, row in self.rows.items() if each != peer}

    def show_records(self, records: Sequence[RoundRecord]) -> None:
        """Take a finished round of a simulation into the table."""
        for record in records:
            row = self.rows[record.peer]
            row.round, row.phase = record.round, "train"
            row.validation_accuracy = record.validation_accuracy
            row.global_accuracy = row.global_accuracy if record.global_accuracy is None else record.global_accuracy
        self.updated()

    def updated(self) -> None:
        """Say the new round where there is no table to show it."""
        common = self._common()
        if self._console.is_terminal or common <= self._reported:
            return
        self._reported = common
        accuracy = _percent(mean(row.validation_accuracy for row in self.rows.values()))
        self.note(
            f"round {common} of {self._federation.rounds}: mean validation accuracy {accuracy}, {self._elapsed()}"
        )

    def _common(self) -> int:
        """The last round that is over for all."""
        return min(self._federation.done_through(row.peer, row.round) for row in self.rows.values())

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        return f"{minutes}:{seconds:02d}"

    def _table(self) -> Table:
        rounds = self._federation.rounds
        common, has_common = self._common(), self._federation.data.has_common_test
        table = Table(
            title=f"{self._federation.federation}: round {max(common, 0)} of {rounds}, {self._elapsed()}",
            caption="accuracy, own: on the peer's own validation images"
            + ("; common: on the common test set" if has_common else ""),
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for heading in ("peer", "architecture", "round", "phase", "progress", "own", *["common"] * has_common):
            justify: Literal["left", "right"] = "left" if heading in ("architecture", "phase", "progress") else "right"
            table.add_column(heading, justify=justify, no_wrap=True)
        for row in self.rows.values():
            bar: ProgressBar | Text = Text(" " * 8)
            if row.steps:
                bar = ProgressBar(total=row.steps, completed=row.step, width=8)
            table.add_row(
                str(row.peer),
                row.arch,
                "-" if row.round < 0 else str(row.round),
                _PHASES.get(row.phase, row.phase),
                bar,
                _percent(row.validation_accuracy),
                *[_percent(row.global_accuracy)] * has_common,
            )
        return table


def result_table(summary: Summary, alone: Summary | None) -> Table:
    """Accuracies of the best round, peer by peer; beside them the same peers learning alone. Without a common test set
    there is no accuracy on one.
    """
    runs = [("together", summary)] + ([("alone", alone)] if alone else [])
    fields = [("common", "global_accuracy"), ("own", "local_accuracy")]
    if all(run.mean_global_accuracy is None for _, run in runs):
        del fields[0]
    common = "common: accuracy on the common test set; own:" if len(fields) > 1 else "own: accuracy"
    table = Table(
        title=f"{summary.method}, {summary.rounds} rounds",
        caption=f"{common} on the peer's own test images.\n" + _measured(summary, alone),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=True,
    )
    columns: list[tuple[str, Sequence[str], str]] = [
        ("peer", [str(peer.id) for peer in summary.peers], "mean"),
        ("architecture", [peer.arch for peer in summary.peers], ""),
        ("images", [str(peer.train_samples) for peer in summary.peers], ""),
    ]
    for where, field in fields:
        for name, run in runs:
            column = [_percent(getattr(peer, field)) for peer in run.peers]
            columns.append((f"{where}\n{name}", column, _percent(getattr(run, f"mean_{field}"))))
    for heading, _, footer in columns:
        justify: Literal["left", "right"] = "left" if heading == "architecture" else "right"
        table.add_column(heading, footer=footer, justify=justify, no_wrap=True)
    for cells in zip(*(column for _, column, _ in columns), strict=True):
        table.add_row(*cells)
    return table


def _measured(summary: Summary, alone: Summary | None) -> str:
    if summary.best_round is None:
        return "Measured at the round that each peer found best (best_round in summary.json)."
    text = f"Measured at the round with the best mean validation accuracy: {summary.best_round}"
    return text + (f" together, {alone.best_round} alone." if alone else ".")


def _percent(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{100 * accuracy:.1f} %"
