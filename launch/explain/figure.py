"""An explanation as a figure: the image, a row a teacher with its weight or why it was dropped, the target beside."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any, Final

from crad_p2p.errors import UsageError
from crad_p2p.explanation import ClassExplanation, Opinion, apart, largest, top
from launch.compare.figures import can_draw
from launch.explain.command import Found

_KEPT, _TARGET, _STUDENT = "#0072b2", "#009e73", "#d55e00"
#: Words on a row of a dropped teacher, and the row.
_DROPPED, _GREYED = "#666666", "#ececec"
#: Classes with a panel of their own, and bars of the target.
_CLASSES: Final = 3
_BARS: Final = 6
#: Characters in a line below the panels.
_CAPTION: Final = 150


def require_drawing(path: Path) -> None:
    """See that a figure can be drawn.

    Raises:
        UsageError: matplotlib is missing, or the file would be no SVG.
    """
    if path.suffix != ".svg":
        raise UsageError(f"--figure {path}: figures are SVG; give a name that ends with .svg")
    if not path.parent.is_dir():
        raise UsageError(f"--figure {path}: {path.parent} is no directory; make it first")
    if not can_draw():
        raise UsageError(
            "--figure: matplotlib is missing; pip install 'crad-p2p[plot]' and start the same command again"
        )


def draw(found: Found, path: Path) -> None:
    """Write it; the same explanation gives the same file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "crad"
    from matplotlib import pyplot

    figure = _make(found)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _make(found: Found) -> Any:
    from matplotlib import pyplot

    labels = list(found.labels)[:_CLASSES]
    rows = len(found.explanation.classes[labels[0]].opinions)
    widths = [1.5, *[2.3] * len(labels), 1.7]
    figure, panels = pyplot.subplots(
        1,
        len(widths),
        figsize=(sum(widths) + 2.2, max(3.2, 1.4 + 0.36 * rows)),
        width_ratios=widths,
        layout="constrained",
    )
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=0.1)
    _image(panels[0], found)
    for place, label in enumerate(labels):
        _weights(panels[1 + place], found, found.explanation.classes[label], is_first=place == 0)
    _target(panels[-1], found)
    method = found.federation.method
    figure.suptitle(
        f"{found.picture.name}: {method.name}, round {found.round}, student peer {found.student.peer} "
        f"({found.student.arch})",
        fontsize=10,
    )
    words = [f"Probabilities at temperature {method.temperature:g}.", *found.notes]
    if len(found.labels) > len(labels):
        words.append(f"Of {len(found.labels)} classes that matter the first {len(labels)} are shown.")
    figure.supxlabel(fill(" ".join(words), _CAPTION), fontsize=7)
    _settle(figure)
    return figure


def _settle(figure: Any) -> None:
    """Lay it out, without the last digits: the solver beneath has others each time, and ids in the file follow them."""
    figure.draw_without_rendering()
    places = [panel.get_position(original=True).bounds for panel in figure.axes]
    figure.set_layout_engine("none")
    for panel, place in zip(figure.axes, places, strict=True):
        panel.set_position([round(each, 5) for each in place])


def _image(panel: Any, found: Found) -> None:
    pixels = found.picture.pixels
    if len(pixels) == 1:
        panel.imshow(pixels[0], cmap="gray", vmin=0, vmax=255)
    else:
        panel.imshow(pixels.transpose(1, 2, 0))
    panel.set_xticks([])
    panel.set_yticks([])
    truth = found.picture.truth
    panel.set_title("class not known" if truth is None else f"true class\n{found.name_of(truth)}", fontsize=8)


def _weights(panel: Any, found: Found, each: ClassExplanation, *, is_first: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    opinions = each.opinions
    places = range(len(opinions))
    shares = [100 * opinion.weight for opinion in opinions]
    longest = max(shares) or 1.0
    panel.barh(places, shares, color=_KEPT, height=0.7)
    for place, opinion in zip(places, opinions, strict=True):
        if opinion.kept:
            text, colour, at = f"{100 * opinion.weight:.1f} %", "black", 100 * opinion.weight
        else:
            text, colour, at = _reason(found, opinion, each), _DROPPED, 0.0
            panel.axhspan(place - 0.42, place + 0.42, color=_GREYED, zorder=0)
        panel.text(at + 0.02 * longest, place, text, va="center", fontsize=7, color=colour)
    panel.set_xlim(0, 1.45 * longest)
    panel.set_xticks([tick for tick in MaxNLocator(4).tick_values(0, longest) if tick <= longest])
    panel.set_ylim(len(opinions) - 0.5, -0.5)
    panel.set_xlabel("weight (%)", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.set_yticks(places, [_voice(found, opinion) for opinion in opinions] if is_first else [])
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    reasons = "\n".join(found.labels[each.label])
    empty = "" if each.note is None else "\nnobody has support"
    # On lines of their own, so that those of panels side by side do not meet.
    panel.set_title(f"class {found.name_of(each.label)}\n{reasons}{empty}\n{each.target:.2f} of the target", fontsize=7)


def _voice(found: Found, opinion: Opinion) -> str:
    """With what it says in all, if that is one teacher's word."""
    said = {f"peer {each.peer}": each for each in found.teachers}.get(opinion.voice)
    says = "" if said is None else f"\nsays {found.name_of(top(said.posterior))}, {max(said.posterior):.2f}"
    return f"{opinion.voice}{f', {opinion.arch}' if opinion.arch else ''}{says}"


def _reason(found: Found, opinion: Opinion, each: ClassExplanation) -> str:
    """In few words."""
    if opinion.deviation is None or each.threshold is None:
        images = f"{opinion.counts or 'no'} image{'s' if (opinion.counts or 0) > 1 else ''}"
        return f"dropped: {images}, {found.federation.method.min_support} needed"
    deviation, median = apart(opinion.deviation, each.threshold)
    return f"dropped: {deviation} off, median {median}"


def _target(panel: Any, found: Found) -> None:
    from matplotlib.ticker import MaxNLocator

    target, own = found.explanation.target, found.student.posterior
    labels = sorted({*largest(target, _BARS), *list(found.labels)[:_CLASSES]})
    places = range(len(labels))
    panel.barh([at - 0.2 for at in places], [target[label] for label in labels], 0.38, color=_TARGET, label="target")
    panel.barh([at + 0.2 for at in places], [own[label] for label in labels], 0.38, color=_STUDENT, label="student")
    panel.set_yticks(places, [found.name_of(label) for label in labels])
    panel.set_ylim(len(labels) - 0.5, -1.2)  # with room for the legend
    panel.tick_params(labelsize=7)
    panel.xaxis.set_major_locator(MaxNLocator(4))
    panel.set_xlabel("probability", fontsize=8)
    panel.set_title("target and student", fontsize=9)
    panel.legend(fontsize=7, frameon=False, ncols=2, loc="upper center", borderpad=0)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
