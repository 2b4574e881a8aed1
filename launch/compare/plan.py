"""What runs a comparison consists of. Nothing is read or written here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crad_p2p.errors import ConfigurationError, UsageError
from crad_p2p.federation import Federation, build_federation, describe_difference
from crad_p2p.methods.catalogue import METHODS
from launch.quick import Quick, federation_of, split_dataset

#: Data set, peers, peers that take part in a round.
Setting = tuple[str, int, int]

#: Fields that options of the command decide; a settings file must not.
_OPTIONS: Mapping[str, str] = {
    "federation": "nothing: it has one of its own",
    "seed": "--seeds",
    "rounds": "--rounds",
    "participation": "--participation",
    "peers": "--count and --pool",
    "data.dataset": "--dataset",
    "data.samples": "--samples",
    "data.partition.kind": "--dataset, with npz:PATH@BY for whole groups",
    "data.partition.by": "--dataset, with npz:PATH@BY for whole groups",
    "data.transfer_samples": "--transfer-samples",
    "data.partition.alpha": "--alpha",
    "method.name": "--methods",
}


@dataclass(frozen=True)
class Planned:
    """One run.

    Attributes:
        name: of its folder; no two runs of a comparison have the same one.
        dataset: as the tables call it.
    """

    name: str
    dataset: str
    federation: Federation

    @property
    def method(self) -> str:
        return self.federation.method.name

    @property
    def seed(self) -> int:
        return self.federation.seed

    @property
    def peers(self) -> int:
        return len(self.federation.peers)

    @property
    def active(self) -> int:
        """Peers that take part in a round."""
        return self.federation.participation or self.peers

    @property
    def setting(self) -> Setting:
        """What all methods have alike in a column of a table, whatever the seed."""
        return self.dataset, self.peers, self.active


def make_plan(
    *,
    methods: Sequence[str],
    datasets: Sequence[str],
    seeds: Sequence[int],
    counts: Sequence[int | None],
    common: Quick,
    settings: Mapping[Any, Any] | None = None,
    source: str = "--settings",
) -> list[Planned]:
    """All runs, in the order in which they are begun: seed by seed, so that whole tables are there early.

    Args:
        datasets: as ``--dataset`` takes them.
        counts: numbers of peers; None is the default.
        common: what all runs have alike; its method, data set, seed and count are not looked at. Alpha is for the data
            sets whose shards are not made of whole groups.
        settings: fields of a federation file for all runs; sections of a single method are for that one alone.
        source: where they are from, for errors.

    Raises:
        UsageError: a value stands twice, two data sets would have one name, ``settings`` has a field that is an
            option, or alpha is given and no data set has a use for it.
        ConfigurationError: a value is not allowed.
    """
    for option, values in (("--methods", methods), ("--dataset", datasets), ("--seeds", seeds), ("--count", counts)):
        _refuse_twice(option, values)
    labels = {dataset: label_of(dataset) for dataset in datasets}
    for dataset, label in labels.items():
        for other in datasets[: datasets.index(dataset)]:
            if labels[other] == label:
                raise UsageError(
                    f"--dataset {other} and {dataset} would both be called {label} in the tables; rename one of the "
                    f"files"
                )
    if common.alpha is not None and all(_has_groups(dataset) for dataset in datasets):
        raise UsageError(
            f"--alpha {common.alpha:g} with --dataset {', '.join(datasets)}: alpha is of the Dirichlet draw class by "
            f"class, and '@' makes shards of whole groups; leave out --alpha, or add a data set without '@'"
        )
    fields = _checked(settings or {}, source)
    plan = []
    for seed in seeds:
        for dataset in datasets:
            for count in counts:
                for method in methods:
                    quick = Quick(
                        count,
                        dataset,
                        None if _has_groups(dataset) else common.alpha,
                        common.rounds,
                        method,
                        seed,
                        common.pool,
                        common.samples,
                        common.participation,
                        common.transfer_samples,
                    )
                    federation = _with_fields(quick, fields, source)
                    plan.append(Planned(_name(labels[dataset], federation), labels[dataset], federation))
    return plan


def name_setting(setting: Setting) -> str:
    """For people."""
    return f"{setting[0]}, {name_size(*setting[1:])}"


def name_size(peers: int, active: int) -> str:
    """For people, without the data set."""
    return f"{peers} peers" if active == peers else f"{peers} peers, {active} active"


def label_of(dataset: str) -> str:
    """What tables and folders call a data set: of a file its name without the ending, and by what it is cut."""
    name, by = split_dataset(dataset)
    if name.startswith("npz:"):
        name = Path(name.removeprefix("npz:")).stem
    return re.sub(r"[^A-Za-z0-9._]+", "_", name if by is None else f"{name}_by_{by}")


def difference(there: Federation, here: Federation) -> str | None:
    """How a run that is there differs from one that is planned; None if it does not. A data file's folder counts."""
    return describe_difference(
        {**there.agreed(), "data.dataset": there.data.dataset},
        {**here.agreed(), "data.dataset": here.data.dataset},
        "that run",
        "this comparison",
    )


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers, comma-separated.

    Raises:
        UsageError: something else stands there.
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text}: expected whole numbers separated by commas, as in 1,2,3") from None


def _has_groups(dataset: str) -> bool:
    return split_dataset(dataset)[1] is not None


def _federation(quick: Quick) -> Federation:
    count = 10 if quick.count is None else quick.count
    if count < 1:
        raise UsageError(f"--count {count}: a run needs at least one peer")
    # Nobody listens there: a simulation has no network, and a file that is the same each time shows what differs.
    return federation_of(quick, [f"127.0.0.1:{1024 + i}" for i in range(count)])


def _name(label: str, federation: Federation) -> str:
    active = "" if federation.participation is None else f"of{federation.participation}"
    return f"{label}-n{len(federation.peers)}{active}-{federation.method.name}-s{federation.seed}"


def _refuse_twice(option: str, values: Sequence[Any]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise UsageError(f"{option}: {value} is given twice; every run is made once, so leave one out")


def _checked(settings: Mapping[Any, Any], source: str) -> Mapping[Any, Any]:
    for path in _paths(settings):
        if (option := _OPTIONS.get(path)) is not None:
            raise UsageError(f"{source}: '{path}' is not for this file; what decides it is {option}")
    return settings


def _paths(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def _with_fields(quick: Quick, fields: Mapping[Any, Any], source: str) -> Federation:
    if not fields or quick.method not in METHODS:
        return _federation(quick)
    method = fields.get("method")
    if isinstance(method, Mapping):
        own = {key: value for key, value in method.items() if key not in METHODS or key == quick.method}
        fields = {**fields, "method": own}
    # What the method needs may be among the fields, so all else is looked at without it first.
    tree = _merged(_federation(replace(quick, method=None)).as_tree(), {"method": {"name": quick.method}})
    try:
        return build_federation(_merged(tree, fields), source)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; in the run of method {quick.method}") from None


def _merged(tree: Mapping[Any, Any], fields: Mapping[Any, Any]) -> dict[Any, Any]:
    merged = dict(tree)
    for key, value in fields.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _merged(below, value) if both and isinstance(below, Mapping) else value
    return merged
