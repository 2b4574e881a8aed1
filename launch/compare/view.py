"""What a person sees while a comparison goes on, and at its end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launch.compare.plan import Planned, name_setting
from launch.compare.tables import Outcome, Spread
from launch.compare.timing import Known
from peer.words import in_time


class View:
    """Live table of the runs that go on, on a terminal; and everywhere one line a run that is over."""

    def __init__(self, console: Console, runs: int, over: int) -> None:
        """
        Args:
            runs: of the whole comparison.
            over: how many of them were made before.
        """
        self._console = console
        self._runs, self._over = runs, over
        self._running: Sequence[Known] = ()
        self._left: float | None = None
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, running: Sequence[Known], left: float | None) -> None:
        """Take what goes on now, and the seconds until everything is over."""
        self._running, self._left = running, left

    def done(self, outcome: Outcome, seconds: float) -> None:
        """Say that a run is finished."""
        summary = outcome.summary
        self._say(
            f"{outcome.planned.name}: done in {in_time(seconds)}, global {_percent(summary.mean_global_accuracy)}, "
            f"local {_percent(summary.mean_local_accuracy)}"
        )

    def failed(self, name: str, words: str) -> None:
        """Say that a run has failed."""
        self._say(f"{name}: FAILED: {words}")

    def _say(self, text: str) -> None:
        self._over += 1
        left = "" if self._left is None or self._over >= self._runs else f"; {self._time_left()}"
        self._console.print(f"[{self._over}/{self._runs}] {text}{left}", markup=False, highlight=False, soft_wrap=True)

    def _time_left(self) -> str:
        return "time left not known yet" if self._left is None else f"about {in_time(self._left)} left"

    def _table(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("run", no_wrap=True)
        table.add_column("round", justify="right", no_wrap=True)
        table.add_column("since", justify="right", no_wrap=True)
        for known in self._running:
            table.add_row(
                known.planned.name, f"{known.rounds} of {known.planned.federation.rounds}", in_time(known.seconds)
            )
        waiting = "; none goes on, they wait for room" if not self._running and self._over < self._runs else ""
        return Group(Text(f"{self._over} of {self._runs} runs are over; {self._time_left()}{waiting}"), table)


def announce(console: Console, plan: Sequence[Planned], over: int, where: str) -> None:
    """Say what is going to be done."""
    methods, seeds = ({getattr(planned, name) for planned in plan} for name in ("method", "seed"))
    settings = {planned.setting for planned in plan}
    kept = f" {over} of them {'are' if over > 1 else 'is'} there already." if over else ""
    console.print(
        f"{len(plan)} runs: {_number(methods, 'method')} × {_number(settings, 'setting')} × {_number(seeds, 'seed')}."
        f"{kept}\nEach is a process of its own with one CPU thread. Everything is written to {where}; Ctrl-C stops, "
        f"the same command makes the runs that are missing.",
        highlight=False,
        soft_wrap=True,
    )


def accuracy_table(outcomes: Sequence[Outcome], seeds: int) -> Table:
    """Accuracies, setting by setting; Table 1 in another form."""
    table = Table(
        title="Accuracy in %, mean over peers" + (f", ± over {seeds} seeds" if seeds > 1 else "; one seed"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("data set", "method"):
        table.add_column(heading, no_wrap=True)
    for heading in ("global", "local"):
        table.add_column(heading, justify="right", no_wrap=True)
    for setting in dict.fromkeys(outcome.planned.setting for outcome in outcomes):
        there = [outcome for outcome in outcomes if outcome.planned.setting == setting]
        for method in dict.fromkeys(outcome.planned.method for outcome in there):
            runs = [outcome.summary for outcome in there if outcome.planned.method == method]
            cells = [
                Spread.of(getattr(run, f"mean_{where}_accuracy") for run in runs).show(_plain, seeds)
                for where in ("global", "local")
            ]
            table.add_row(name_setting(setting), method, *cells)
    return table


def _number(found: Collection[object], word: str) -> str:
    return f"{len(found)} {word}{'s' if len(found) != 1 else ''}"


def _plain(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"
