"""The comparison itself: makes the runs that are missing, and writes what all of them say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from crad_p2p import __version__
from crad_p2p.durable import write_file
from crad_p2p.errors import ConfigurationError, IncompleteError
from crad_p2p.federation import load_federation
from crad_p2p.results import RoundRecord, Summary
from launch.compare import figures, tables
from launch.compare.plan import Planned, difference
from launch.compare.run import COST, HISTORY, SUMMARY, Cost
from launch.compare.tables import Outcome
from launch.compare.timing import Known, SideBySide, seconds_left
from launch.compare.view import View
from launch.engines import LOG, Began, Engine, Job
from launch.kept import has_models, models_dir
from launch.quick import write_federation

#: Failed runs that the last sentence names for a reason, and reasons; each run has a line of its own above it.
_MOST_NAMED = 5
_PEERS = "peers.yaml"


@dataclass
class _Running:
    planned: Planned
    since: float


def folder_of(out: Path, planned: Planned) -> Path:
    """Where a run lies."""
    return out / "runs" / planned.name


def find_finished(plan: Iterable[Planned], out: Path) -> dict[str, Outcome]:
    """The runs that are there already, by name.

    Raises:
        ConfigurationError: one of them was made with other settings, or is damaged.
    """
    found = {}
    for planned in plan:
        folder = folder_of(out, planned)
        if (folder / SUMMARY).exists():
            found[planned.name] = _read(planned, folder)
    return found


def name_without_models(outcomes: Iterable[Outcome], out: Path) -> str | None:
    """Which finished runs have not kept their models, as a sentence; None if all have."""
    names = [each.planned.name for each in outcomes if not has_models(folder_of(out, each.planned))]
    if not names:
        return None
    return (
        f"Made before without --keep-models, and left as they are: {_few(names, ', ')}. To have them with models, "
        f"remove their folders in {out / 'runs'} and start the same command again."
    )


def _read(planned: Planned, folder: Path) -> Outcome:
    try:
        summary = Summary.read(folder / SUMMARY)
        history = [RoundRecord.from_line(line) for line in (folder / HISTORY).read_text().splitlines()]
        cost = Cost.read(folder / COST)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{folder}: its results are damaged ({type(error).__name__}: {error}); remove this folder, and start the "
            f"same command again"
        ) from None
    differs = difference(load_federation(folder / _PEERS), planned.federation)
    if differs is None and summary.config_digest != planned.federation.digest():
        differs = f"config_digest is {summary.config_digest} in its {SUMMARY}"
    if differs:
        raise ConfigurationError(
            f"{folder} holds a run with other settings: {differs}; choose another --out, or remove this folder"
        )
    return Outcome(planned, summary, history, cost)


def prepare(planned: Planned, out: Path) -> Path:
    """Make the folder of a run that is to begin from its start, without what an interrupted one has left."""
    folder = folder_of(out, planned)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SUMMARY, HISTORY, COST, LOG):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(models_dir(folder), ignore_errors=True)
    write_federation(planned.federation, folder / _PEERS)
    return folder


class Session:
    """One command.

    Args:
        plan: all runs.
        outcomes: those that are there, by name.
        command: for the tables.
    """

    def __init__(self, plan: Sequence[Planned], outcomes: dict[str, Outcome], out: Path, command: str) -> None:
        self._plan = plan
        self._outcomes = outcomes
        self._out = out
        self._command = command
        self._failed: dict[str, str] = {}

    def make(self, jobs: Sequence[Job], engine: Engine, console: Console) -> None:
        """Make runs; the tables are written anew after each.

        Raises:
            ConfigurationError: methods turn out to have learned from different shards.
        """
        planned = {each.name: each for each in self._plan}
        waiting = [planned[job.name] for job in jobs]
        running: dict[str, _Running] = {}
        side_by_side = SideBySide()
        at_once = 1
        with View(console, len(self._plan), len(self._outcomes)) as view, closing(engine.run(jobs)) as happenings:
            for happened in happenings:
                for each in happened:
                    name = each.job.name
                    if isinstance(each, Began):
                        waiting.remove(planned[name])
                        running[name] = _Running(planned[name], time.monotonic())
                        continue
                    seconds = time.monotonic() - running.pop(name).since
                    self._show(view, waiting, running, at_once)
                    if each.code == 0:
                        self._outcomes[name] = _read(planned[name], each.job.folder)
                        view.done(self._outcomes[name], seconds)
                        self.write_tables()
                    else:
                        self._failed[name] = each.why or words_of(each.job, each.code)
                        view.failed(name, self._failed[name])
                at_once = side_by_side.of(time.monotonic(), len(running))
                self._show(view, waiting, running, at_once)

    def _show(self, view: View, waiting: Sequence[Planned], running: dict[str, _Running], at_once: int) -> None:
        now = time.monotonic()
        speeds = [
            Known(each.planned, rounds_done(folder_of(self._out, each.planned)), now - each.since)
            for each in running.values()
        ]
        finished = [Known(each.planned, each.summary.rounds, each.summary.wall_seconds) for each in self.outcomes()]
        view.update(speeds, seconds_left(waiting, speeds, finished, at_once))

    def outcomes(self) -> list[Outcome]:
        """The finished runs, in the order of the plan."""
        return [self._outcomes[planned.name] for planned in self._plan if planned.name in self._outcomes]

    def write_tables(self) -> None:
        """Write results.csv, runs.csv, results.json and results.md.

        Raises:
            ConfigurationError: see :func:`tables.check_equal_shards`.
        """
        outcomes = self.outcomes()
        tables.check_equal_shards(outcomes)
        peers, runs = tables.peer_rows(outcomes), tables.run_rows(outcomes)
        document = {"version": __version__, "command": self._command, "runs": runs, "peers": peers}
        write_file(self._out / "results.csv", tables.to_csv(peers))
        write_file(self._out / "runs.csv", tables.to_csv(runs))
        write_file(self._out / "results.json", json.dumps(document, indent=1) + "\n")
        write_file(self._out / "results.md", tables.to_markdown(self._plan, outcomes, self._command, __version__))

    def draw(self) -> str:
        """Draw the figures; where they are, or how to get them."""
        if not figures.can_draw():
            return (
                "Without figures: matplotlib is missing; pip install 'crad-p2p[plot]' and start the same command again"
            )
        figures.draw(self.outcomes(), self._out / "figures")
        return f"Figures: {self._out / 'figures'}"

    def complain(self) -> None:
        """Raises:
        IncompleteError: runs have failed.
        """
        if not self._failed:
            return
        alike: dict[str, list[str]] = {}
        for name, words in self._failed.items():
            alike.setdefault(words, []).append(name)
        reasons = [f"{_few(names, ', ')} ({words})" for words, names in alike.items()]
        raise IncompleteError(
            f"{len(self._failed)} of {len(self._plan)} runs failed: {_few(reasons, '; ')}; see {LOG} in their folders "
            f"in {self._out / 'runs'}; the same command makes them again"
        )


def _few(words: Sequence[str], separator: str) -> str:
    more = len(words) - _MOST_NAMED
    return separator.join(words[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def rounds_done(folder: Path) -> int:
    """The last round that a run has written to its history; 0 if there is none."""
    try:
        with (folder / HISTORY).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return 0
    for line in reversed(lines):
        if line.endswith(b"\n"):  # another is being written
            try:
                return int(json.loads(line)["round"])
            except (ValueError, KeyError):
                return 0
    return 0


def words_of(job: Job, code: int) -> str:
    """Why a run has failed: the last line that it has said, or how it ended."""
    if code < 0:
        hint = "; the system does that when memory runs out" if -code == signal.SIGKILL else ""
        return f"ended by signal {-code}{hint}"
    try:
        with (job.folder / LOG).open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            lines = log.read().decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].strip() if lines else f"it ended with {code}, without a word"
