"""From the results of runs to rows and tables. Nothing is read or written here."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crad_p2p.errors import ConfigurationError
from crad_p2p.results import RoundRecord, Summary, mean
from launch.compare.plan import Planned, Setting, name_setting, name_size
from launch.compare.run import Cost

Row = dict[str, Any]
#: In a table, for "not measured".
NOTHING = "–"


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    planned: Planned
    summary: Summary
    history: Sequence[RoundRecord]
    cost: Cost


@dataclass(frozen=True)
class Spread:
    """Values of several seeds.

    Attributes:
        mean: None if there is no value.
        deviation: standard deviation of the sample (n − 1); None for fewer than two values.
        count: how many values there are.
    """

    mean: float | None
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        there = [value for value in values if value is not None]
        return cls(mean(there), statistics.stdev(there) if len(there) > 1 else None, len(there))

    def show(self, form: Callable[[float], str], expected: int) -> str:
        """``30.5 ± 0.8``; of a single value no spread; with the number of values if some are missing."""
        if self.mean is None:
            return NOTHING
        text = form(self.mean)
        if self.deviation is not None:
            text += f" ± {form(self.deviation)}"
        return text if self.count == expected else f"{text} ({self.count} of {expected})"


def check_equal_shards(outcomes: Iterable[Outcome]) -> None:
    """See that all methods have learned from the same shards.

    Raises:
        ConfigurationError: two runs of one data set, seed and size have not; the data were changed in between.
    """
    first: dict[tuple[Any, ...], Outcome] = {}
    for outcome in outcomes:
        planned = outcome.planned
        there = first.setdefault((planned.dataset, planned.seed, planned.peers), outcome)
        if there.cost.partition != outcome.cost.partition:
            raise ConfigurationError(
                f"runs {there.planned.name} and {planned.name} have learned from different shards: the images of "
                f"{planned.dataset} were changed in between; remove the folder of the older one, and start the same "
                f"command again"
            )


def peer_rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """One row a run and peer. Accuracies are fractions, of the best round, which is ``round``."""
    return [
        {
            **_which(outcome),
            "round": peer.best_round,
            "peer": peer.id,
            "arch": peer.arch,
            "train_samples": peer.train_samples,
            "support": sum(peer.counts),
            "global_accuracy": peer.global_accuracy,
            "local_accuracy": peer.local_accuracy,
            "peak_global_accuracy": peer.peak_global_accuracy,
            "peak_local_accuracy": peer.peak_local_accuracy,
        }
        for outcome in outcomes
        for peer in outcome.summary.peers
    ]


def run_rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """One row a run; accuracies are unweighted means over its peers."""
    return [
        {
            **_which(outcome),
            "rounds": outcome.summary.rounds,
            "round": outcome.summary.best_round,
            **{name: read(outcome.summary) for name, read in _ACCURACIES.items()},
            "target_mass": mean(record.target_mass for record in outcome.history),
            "target_top1": mean(record.target_top1 for record in outcome.history),
            "bytes_sent": outcome.cost.bytes_sent,
            "cpu_seconds": outcome.cost.cpu_seconds,
            "wall_seconds": outcome.cost.wall_seconds,
            "device": outcome.cost.device,
            "teacher_precision": outcome.summary.peers[0].teacher_precision,
            "config_digest": outcome.summary.config_digest,
        }
        for outcome in outcomes
    ]


def to_csv(rows: Sequence[Row]) -> str:
    """With a heading; what was not measured is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_markdown(plan: Sequence[Planned], outcomes: Sequence[Outcome], command: str, version: str) -> str:
    """``results.md``.

    Args:
        plan: all runs that should be there.
        outcomes: those that are.
        command: that makes the same tables again.
    """
    missing = len(plan) - len(outcomes)
    parts = [
        "# Results of a comparison\n",
        f"{len(outcomes)} of {len(plan)} runs, made with crad-p2p {version}.\n",
    ]
    if missing:
        parts.append(f"**{missing} run{'s are' if missing > 1 else ' is'} missing**; the same command makes them.\n")
    parts += _remarks(outcomes)
    tables = [_first_table(plan, outcomes), _second_table(plan, outcomes)]
    if len({(planned.peers, planned.active) for planned in plan}) > 1:
        tables.append(_third_table(plan, outcomes))
    return "\n".join([*parts, *(f"{table}\nMade by `{command}`.\n" for table in tables)])


# --- what is read from a run --------------------------------------------------------------------------------------


def _peaks(name: str) -> Callable[[Summary], float | None]:
    return lambda summary: mean(getattr(peer, name) for peer in summary.peers)


_ACCURACIES: dict[str, Callable[[Summary], float | None]] = {
    "global_accuracy": lambda summary: summary.mean_global_accuracy,
    "local_accuracy": lambda summary: summary.mean_local_accuracy,
    "peak_global_accuracy": _peaks("peak_global_accuracy"),
    "peak_local_accuracy": _peaks("peak_local_accuracy"),
}


def _accuracy(name: str) -> Callable[[Outcome], float | None]:
    return lambda outcome: _ACCURACIES[name](outcome.summary)


def _megabytes(outcome: Outcome) -> float | None:
    return None if outcome.cost.bytes_sent is None else outcome.cost.bytes_sent / 1e6


#: For one peer and a round in which it takes part; columns of Table 2.
_SECONDS: dict[str, Callable[[Outcome], float | None]] = {
    "CPU seconds": lambda outcome: outcome.cost.cpu_seconds / outcome.planned.active,
    "wall seconds": lambda outcome: outcome.cost.wall_seconds / outcome.planned.active,
}


def _which(outcome: Outcome) -> Row:
    planned = outcome.planned
    return {
        "run": planned.name,
        "method": planned.method,
        "dataset": planned.dataset,
        "seed": planned.seed,
        "peers": planned.peers,
        "participation": planned.active,
    }


def _remarks(outcomes: Sequence[Outcome]) -> list[str]:
    remarks = []
    refused = [each.planned.name for each in outcomes if any(peer.quarantined_teachers for peer in each.summary.peers)]
    if refused:
        remarks.append(f"In these runs some snapshots were refused, and did not teach: {', '.join(refused)}.\n")
    precisions = {str(each.summary.peers[0].teacher_precision) for each in outcomes}
    devices = {each.cost.device.partition(":")[0] for each in outcomes}
    for what, found in (("teachers computed in", precisions), ("runs were made on", devices)):
        if len(found) > 1:
            remarks.append(f"Not all runs are alike: {what} {' or '.join(sorted(found))} (`runs.csv` says which).\n")
    return remarks


# --- tables -------------------------------------------------------------------------------------------------------


def _first_table(plan: Sequence[Planned], outcomes: Sequence[Outcome]) -> str:
    settings = _settings(plan)
    heads = [f"{name_setting(setting)}, {where}" for setting in settings for where in ("global", "local")]
    rows = []
    for method, label, prefix in _lines(plan, outcomes):
        cells = [
            _cell(plan, outcomes, method, setting, _accuracy(f"{prefix}{where}_accuracy"), _percent)
            for setting in settings
            for where in ("global", "local")
        ]
        rows.append([label, *cells])
    return _table(
        "Table 1: accuracy",
        "Per cent. Global: on the common test set; local: on each peer's own test images. Unweighted mean over the "
        "peers at the round with the best mean validation accuracy. " + _seeds(plan),
        ["method", *heads],
        rows,
    )


def _second_table(plan: Sequence[Planned], outcomes: Sequence[Outcome]) -> str:
    rows = []
    for setting in _settings(plan):
        for method in _methods(plan):
            cells = [_cell(plan, outcomes, method, setting, _megabytes, _short, is_computed=True)]
            cells += [_cell(plan, outcomes, method, setting, read, _short) for read in _SECONDS.values()]
            rows.append([name_setting(setting), method, *cells])
    return _table(
        "Table 2: cost",
        "For one peer and a round in which it takes part. MB sent (10⁶ bytes): *computed* from the size of a snapshot, "
        "which goes to every other peer of the round, the mean over the peers; class statistics and manifests, about a "
        "kilobyte, are left out. Seconds: *measured* in the simulation, where a process with one thread computes one "
        "peer after another, with validation and tests; its first round is left out if there are more. Runs side by "
        "side slow one another down, so seconds of one table compare with each other, and not with those of another "
        "machine. " + _seeds(plan),
        ["data set", "method", "MB sent", *_SECONDS],
        rows,
    )


def _third_table(plan: Sequence[Planned], outcomes: Sequence[Outcome]) -> str:
    datasets = list(dict.fromkeys(planned.dataset for planned in plan))
    sizes = list(dict.fromkeys((planned.peers, planned.active) for planned in plan))
    rows = []
    for dataset in datasets:
        for method, label, prefix in _lines(plan, outcomes):
            cells = [
                _cell(plan, outcomes, method, (dataset, *size), _accuracy(f"{prefix}global_accuracy"), _percent)
                for size in sizes
            ]
            rows.append([dataset, label, *cells])
    return _table(
        "Table 3: size of the pool",
        "Global accuracy in per cent, the mean over all peers of the pool. " + _seeds(plan),
        ["data set", "method", *(name_size(*size) for size in sizes)],
        rows,
    )


def _cell(
    plan: Sequence[Planned],
    outcomes: Sequence[Outcome],
    method: str,
    setting: Setting,
    read: Callable[[Outcome], float | None],
    form: Callable[[float], str],
    is_computed: bool = False,
) -> str:
    there = [each for each in outcomes if (each.planned.method, each.planned.setting) == (method, setting)]
    expected = sum((planned.method, planned.setting) == (method, setting) for planned in plan)
    spread = Spread.of(read(each) for each in there)
    if is_computed:  # not measured anew with each seed
        spread = replace(spread, deviation=None)
    return spread.show(form, expected)


def _lines(plan: Sequence[Planned], outcomes: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """Method, what the line is called, and what stands before the names of its accuracies; a method that has a peak
    model has a second line for it.
    """
    lines = []
    for method in _methods(plan):
        lines.append((method, method, ""))
        mine = [each for each in outcomes if each.planned.method == method]
        if any(_ACCURACIES["peak_global_accuracy"](each.summary) is not None for each in mine):
            lines.append((method, f"{method}, peak model", "peak_"))
    return lines


def _methods(plan: Sequence[Planned]) -> list[str]:
    return list(dict.fromkeys(planned.method for planned in plan))


def _settings(plan: Sequence[Planned]) -> list[Setting]:
    return list(dict.fromkeys(planned.setting for planned in plan))


def _seeds(plan: Sequence[Planned]) -> str:
    seeds = list(dict.fromkeys(planned.seed for planned in plan))
    named = ", ".join(map(str, seeds))
    if len(seeds) == 1:
        return f"One seed ({named}), so there is no spread."
    return f"Mean ± standard deviation (n − 1) over {len(seeds)} seeds ({named})."


def _short(value: float) -> str:
    return f"{value:.3g}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def _table(title: str, words: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"## {title}\n", f"{words}\n", _line(heads), _line(["---"] * len(heads)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
