"""Figures of a comparison, as SVG. What they show is decided in ``series``; matplotlib is the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launch.compare import series
from launch.compare.plan import name_setting
from launch.compare.tables import Outcome

#: Told apart also by those who do not see all colours (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_MARKERS = "osD^vPX*"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Three figures for each data set and pool size; their files. Those of an earlier comparison are replaced."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "crad"  # the same results give the same file
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    paths = []
    settings = dict.fromkeys(outcome.planned.setting for outcome in outcomes)
    for setting in settings:
        dataset, peers, active = setting
        runs = [outcome for outcome in outcomes if outcome.planned.setting == setting]
        name = f"{dataset}-n{peers}" + ("" if active == peers else f"of{active}")
        for kind, make in (("curves", _curves), ("classes", _classes), ("clients", _clients)):
            paths.append(folder / f"{kind}-{name}.svg")
            make(runs, name_setting(setting), paths[-1])
    return paths


def _curves(runs: Sequence[Outcome], title: str, path: Path) -> None:
    figure, panel = _panel(title, "round", "global accuracy (%)")
    lines = series.learning_curves(runs)
    _lines(panel, lines)
    if len({x for line in lines for x in line.x}) == 1:  # else the axis is of fractions of a round
        panel.set_xticks(lines[0].x)
    _save(figure, panel, path, _seeds(runs))


def _classes(runs: Sequence[Outcome], title: str, path: Path) -> None:
    figure, panel = _panel(title, "class, from a peer's most common to its rarest", "accuracy on the class (%)")
    _lines(panel, series.accuracy_by_support(runs))
    support = series.support_by_class(runs)
    beside = panel.twinx()
    beside.bar(range(1, len(support) + 1), support, color="#dddddd", zorder=0)
    beside.set_ylabel("validation images (bars)")
    panel.set_zorder(1)
    panel.patch.set_visible(False)
    _save(figure, panel, path, _seeds(runs))


def _clients(runs: Sequence[Outcome], title: str, path: Path) -> None:
    found = series.clients(runs)
    figure, panel = _panel(title, "peer", "global accuracy (%)")
    places = range(len(found))
    methods = list(found[0].accuracy) if found else []
    for number, method in enumerate(methods):
        values = [_or_nan(client.accuracy[method]) for client in found]
        beside = (number - (len(methods) - 1) / 2) * 0.7 / len(methods)  # so that equal ones do not hide one another
        panel.plot([x + beside for x in places], values, linestyle="none", label=method, **_style(number))
    panel.set_ylim(bottom=0)
    panel.set_xticks(places, [str(client.peer) for client in found], fontsize=8 if len(found) < 30 else 4)
    right = panel.twinx()
    right.bar(places, [client.train_samples for client in found], color="#dddddd", zorder=0)
    right.set_ylabel("training images (bars)")
    panel.set_zorder(1)
    panel.patch.set_visible(False)
    _save(figure, panel, path, _seeds(runs, bands=False))


def _lines(panel: Any, lines: Sequence[series.Line]) -> None:
    for number, line in enumerate(lines):
        style = _style(number)
        middle = [_or_nan(spread.mean) for spread in line.y]
        # The first named lies above the others, each a little thinner than what it may cover.
        above = {"zorder": 3 - number / 100, "linewidth": 1.2 + 0.15 * number}
        panel.plot(line.x, middle, label=line.method, **above, **style)
        if any(spread.deviation is not None for spread in line.y):  # one seed has no band
            wide = [spread.deviation or 0.0 for spread in line.y]
            low = [max(0.0, mid - each) for mid, each in zip(middle, wide, strict=True)]
            high = [min(100.0, mid + each) for mid, each in zip(middle, wide, strict=True)]
            panel.fill_between(line.x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKERS[(number + number // len(_COLOURS)) % len(_MARKERS)],
        "markersize": 4,
    }


def _panel(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, panel = pyplot.subplots(figsize=(6.5, 4), layout="constrained")
    panel.set_title(title, fontsize=10)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, panel


def _save(figure: Any, panel: Any, path: Path, words: str) -> None:
    from matplotlib import pyplot

    figure.legend(*panel.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    figure.supxlabel(words, fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _seeds(runs: Sequence[Outcome], *, bands: bool = True) -> str:
    seeds = sorted({run.planned.seed for run in runs})
    named = ", ".join(map(str, seeds))
    if len(seeds) == 1:
        return f"one seed ({named})"
    return f"mean over {len(seeds)} seeds ({named})" + ("; bands: one standard deviation" if bands else "")


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
