"""Dividing the images of one site into train, validation and test, by the federation's seed alone.

The site's own division stands where it has one. Else no patient is in two parts, where patients are known; else each
class is divided as a shard of a common data set is (:func:`crad_p2p.data.partition.split_holdout`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from crad_p2p.data.own.listing import PARTS
from crad_p2p.data.partition import Split, split_holdout

#: How a site's images were divided, for its summary.
GIVEN, BY_PATIENT, BY_CLASS = "as given", "by patient", "by class"


def divide(
    labels: NDArray[np.int64],
    patients: Sequence[str | None],
    parts: Sequence[str | None],
    holdout: float,
    generator: np.random.Generator,
    *,
    may_cut: bool,
) -> tuple[Split, str]:
    """Divide all images of a site.

    Args:
        labels: int64 [n].
        patients: of whom each image is; None where that is not known, which is so for all or for none of a part.
        parts: where the site wants each image; all None, or none.
        holdout: share in (0, 1) that is held out, half of it to validate, half to test.
        generator: source of all draws.
        may_cut: a part that the site has not given is cut out of its training images, at half of the share.

    Returns:
        the split, as indices into the images, and how it came about.
    """
    everything = np.arange(len(labels))
    if not any(parts):
        return _cut(labels, patients, everything, holdout, generator)
    given = {part: everything[np.array([each == part for each in parts], dtype=bool)] for part in PARTS}
    missing = [part for part in ("validation", "test") if not len(given[part])]
    if len(missing) != 1 or not may_cut:
        return Split(*(given[part] for part in PARTS)), GIVEN
    cut, how = _cut(labels, patients, given["train"], holdout / 2, generator)
    given["train"] = cut.train
    given[missing[0]] = np.sort(np.concatenate([cut.validation, cut.test]))
    return Split(*(given[part] for part in PARTS)), f"{GIVEN}, {missing[0]} cut out of train {how}"


def _cut(
    labels: NDArray[np.int64],
    patients: Sequence[str | None],
    indices: NDArray[np.int64],
    holdout: float,
    generator: np.random.Generator,
) -> tuple[Split, str]:
    known = [patients[i] for i in indices]
    if len(indices) and all(patient is not None for patient in known):
        return _split_patients(labels, [str(patient) for patient in known], indices, holdout, generator), BY_PATIENT
    return split_holdout(labels, indices, holdout, generator), BY_CLASS


def _split_patients(
    labels: NDArray[np.int64],
    patients: Sequence[str],
    indices: NDArray[np.int64],
    holdout: float,
    generator: np.random.Generator,
) -> Split:
    """Give whole patients to the parts, so that every class comes as near to its shares as that allows. (Of a common
    set, :func:`crad_p2p.data.groups.hold_out_groups` asks for three groups and does not look at classes; a site has
    the patients that it has, and classes that are rare.)

    One after the other, those with most images first (equal ones in an order that is drawn), each to the part where it
    adds least to the sum over classes and parts of (images - due)² / due.
    """
    classes, column = np.unique(labels[indices], return_inverse=True)
    names, who = np.unique(np.array(patients), return_inverse=True)
    counts = np.zeros((len(names), len(classes)), dtype=np.int64)
    np.add.at(counts, (who, column), 1)
    shares = np.array([1 - holdout, holdout / 2, holdout / 2])
    due = shares[:, np.newaxis] * counts.sum(axis=0)  # [parts, classes]
    order = generator.permutation(len(names))
    order = order[np.argsort(-counts[order].sum(axis=1), kind="stable")]
    there, part_of = np.zeros_like(due), np.empty(len(names), dtype=np.int64)
    for patient in order:
        more = counts[patient]
        added = (more * (2 * (there - due) + more) / due).sum(axis=1)
        part = int(np.argmin(np.round(added, 9)))  # where equal the first: train
        part_of[patient] = part
        there[part] += more
    return Split(*(indices[part_of[who] == part] for part in range(len(PARTS))))
