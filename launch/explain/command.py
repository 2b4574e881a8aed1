"""One ``crad-mesh explain``, from the directory of a run to what is printed and drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from crad_p2p.data.datasets import Dataset, load_dataset
from crad_p2p.errors import ConfigurationError, UsageError
from crad_p2p.explanation import Explanation, Teacher, collapse, explain, labels_that_matter
from crad_p2p.federation import Federation
from crad_p2p.foreign import printable
from crad_p2p.methods.catalogue import METHODS
from launch.explain.image import Picture, find_image
from launch.explain.source import Source, ahead_of, ask, common_round, find, others
from peer.words import name_peers


@dataclass(frozen=True)
class Found:
    """All that there is to show.

    Attributes:
        labels: classes to show, and why each, as :func:`labels_that_matter`.
        notes: sentences.
    """

    federation: Federation
    round: int
    class_names: tuple[str, ...]
    picture: Picture
    student: Teacher
    teachers: tuple[Teacher, ...]
    explanation: Explanation
    labels: Mapping[int, list[str]]
    notes: tuple[str, ...]

    def name_of(self, label: int) -> str:
        """A class by its number and, if that is another, its name."""
        name = printable(self.class_names[label], 40)
        return name if name == str(label) else f"{label} ({name})"

    def document(self) -> dict[str, Any]:
        """For programs: everything, of all classes."""
        return {
            "image": {"name": self.picture.name, "number": self.picture.number, "true_class": self.picture.truth},
            "federation": self.federation.federation,
            "config_digest": self.federation.digest(),
            "method": self.federation.method.name,
            "temperature": self.federation.method.temperature,
            "precision": "float32",
            "round": self.round,
            "rounds": self.federation.rounds,
            "class_names": list(self.class_names),
            "student": _plain(self.student),
            "teachers": [_plain(each) for each in self.teachers],
            **asdict(self.explanation),
            "shown": {str(label): reasons for label, reasons in self.labels.items()},
            "notes": list(self.notes),
        }


def _plain(teacher: Teacher) -> dict[str, Any]:
    return {**asdict(teacher), "statistics": teacher.statistics.model_dump()}


def show(
    console: Console,
    word: str,
    directory: Path,
    *,
    student: int | None,
    figure: Path | None,
    as_json: bool,
    data_dir: Path | None,
    download: bool,
) -> None:
    """Explain one image, on the console and perhaps in a figure.

    Raises:
        CradError: a sentence that says why it cannot be done.
    """
    from launch.explain.figure import draw, require_drawing
    from launch.explain.view import print_found

    if figure is not None:
        require_drawing(figure)
    source = find(directory, data_dir)
    chosen = _student(source, student)
    federation = source.federation
    if federation.data.is_own:
        raise UsageError(
            f"--run {source.directory}: its peers have their own images (data.partition.kind own), and explained are "
            f"images of a common data set; choose another run"
        )
    number = common_round(source)
    dataset = load_dataset(
        federation.data, seed=federation.seed, data_dir=(data_dir or Path()).resolve(), download=download
    )
    picture = find_image(word, dataset)
    found = _found(source, number, dataset, picture, chosen)
    if figure is not None:
        draw(found, figure)
    if as_json:
        print(json.dumps(found.document(), indent=1))
        return
    print_found(console, found)
    if figure is not None:
        console.print(f"Figure: {figure}", soft_wrap=True, highlight=False, markup=False)


def _student(source: Source, given: int | None) -> int:
    """Whose targets are explained.

    Raises:
        UsageError: the method has no target to be explained, or there is nobody to teach.
        ConfigurationError: no peer has this id.
    """
    federation = source.federation
    if not federation.method.traits.has_target:
        names = [name for name, traits in METHODS.items() if traits.has_target]
        raise UsageError(
            f"--run {source.directory}: its method is {federation.method.name}, which makes no target of what teachers "
            f"say of an image; those that do are {', '.join(names)}"
        )
    if len(federation.ids) < 2:
        raise ConfigurationError(
            f"{source.file}: it has one peer alone, whom nobody teaches; nothing is to be explained"
        )
    return federation.ids[0] if given is None else federation.peer(given, source.file).id


def _found(source: Source, number: int, dataset: Dataset, picture: Picture, student: int) -> Found:
    said = ask(source, number, dataset, picture.pixels)
    teachers = others(said, student)
    explanation = explain(source.federation, teachers, said[student])
    return Found(
        federation=source.federation,
        round=number,
        class_names=dataset.class_names,
        picture=picture,
        student=said[student],
        teachers=tuple(teachers),
        explanation=explanation,
        labels=labels_that_matter(explanation, said[student], picture.truth),
        notes=tuple(_notes(source, number, explanation)),
    )


def _notes(source: Source, number: int, explanation: Explanation) -> list[str]:
    federation, notes = source.federation, []
    if ahead := ahead_of(source, number):
        notes.append(
            f"{name_peers(ahead).capitalize()} {'are' if len(ahead) > 1 else 'is'} ahead: round {number} is the last "
            f"as of which every peer's snapshot is there."
        )
    if federation.participation is not None:
        notes.append(
            f"All peers but the student teach here, with what each published last; in a round of this run "
            f"{federation.participation} peers take part."
        )
    if number < federation.method.warmup_rounds:
        notes.append(f"Up to round {federation.method.warmup_rounds} peers learn from their own labels alone.")
    if explanation.has_filter and federation.privacy.count_epsilon is not None:
        notes.append("Validation images and hits are those that were published, with noise (privacy.count_epsilon).")
    if explanation.collapsed:
        notes.append(collapse(explanation.mass))
    return notes
