"""peers.yaml: what all peers of a federation must agree on, and the digest that identifies it.

Free of torch and grpc: the service, the learner and the launcher all read it.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import json
import re
from collections.abc import Hashable, Iterable
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from crad_p2p.data.place import absolute_place, check_place, is_litter, plain
from crad_p2p.errors import ConfigurationError
from crad_p2p.foreign import printable
from crad_p2p.methods.catalogue import METHODS, Traits
from crad_p2p.participation import Part, Schedule, drawn_schedule
from crad_p2p.randomness import drawn_number

#: The paper's pool: peer ``i`` has architecture ``POOL[i mod 3]`` unless its entry says otherwise.
POOL = ("resnet18", "resnet18-half", "cnn6")
#: Every name that can stand in an architecture id; :mod:`crad_p2p.architectures` builds them.
ARCHITECTURES = POOL

TORCHVISION_SETS = ("cifar10", "cifar100")
#: The single-label 2D sets of MedMNIST. ChestMNIST is multi-label and refused by name.
MEDMNIST_SETS = (
    "pathmnist",
    "dermamnist",
    "octmnist",
    "pneumoniamnist",
    "retinamnist",
    "breastmnist",
    "bloodmnist",
    "tissuemnist",
    "organamnist",
    "organcmnist",
    "organsmnist",
)
DATASETS = ("digits", *TORCHVISION_SETS, *MEDMNIST_SETS)

#: Keys of what a peer publishes where it is no model (:meth:`Federation.published_by`); behind ``images`` is how many.
PREDICTIONS, IMAGES, MODEL_DIGEST, BUNDLE = "predictions", "images", "model_digest", "bundle"

#: What a federation may be called: a DNS label, since certificates have it in a host name.
FEDERATION_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"

#: Fields that may differ between hosts and therefore do not count for the digest.
_HOST_FIELDS = frozenset({"address"})
#: The kind of partition where each site brings its own images.
OWN = "own"


def parse_architecture(identifier: str) -> tuple[str, float]:
    """Split an architecture id such as ``resnet18@0.25`` into its name and its width.

    The width multiplies every channel count; ``resnet18-half`` is ``resnet18`` at half of it.

    Raises:
        ValueError: the name is unknown or the width is not a number in (0, 4].
    """
    name, at, text = identifier.partition("@")
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture '{identifier}' is unknown{_suggest(name, ARCHITECTURES)}")
    if not at:
        return name, 1.0
    try:
        width = float(text)
    except ValueError:
        width = 0.0
    if not 0 < width <= 4:
        raise ValueError(f"the width in architecture '{identifier}' must be a number above 0 and at most 4")
    return name, width


def _check_architecture(identifier: str) -> str:
    parse_architecture(identifier)
    return identifier


def _check_dataset(name: str) -> str:
    if name == "chestmnist":
        raise ValueError("data set 'chestmnist' is multi-label, and CRAD learns single-label classes: choose another")
    if name in DATASETS or (name.startswith("npz:") and len(name) > len("npz:")):
        return name
    raise ValueError(f"data set '{name}' is unknown{_suggest(name, (*DATASETS, 'npz:PATH'))}")


def _check_method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"method '{name}' is unknown{_suggest(name, METHODS)}")
    return name


def check_address(address: str) -> str:
    """HOST:PORT as it is; anything else is a ValueError."""
    found = re.fullmatch(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", address)
    if not found or not 0 < int(found[1]) < 65536:
        raise ValueError(
            f"address '{address}' must be HOST:PORT with a port from 1 to 65535, as in 'a.example.org:7400'"
        )
    return address


def _suggest(word: str, allowed: Iterable[str]) -> str:
    names = list(allowed)
    close = difflib.get_close_matches(word, names, n=1)
    meant = f"; did you mean '{close[0]}'?" if close else ""
    return f"{meant or ';'} allowed are {', '.join(names)}"


class _Model(BaseModel):
    # Strict: "rounds: yes" is a slip, not 1. The file is checked in JSON's types, so a list may stand for a tuple.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class PartitionSettings(_Model):
    """How one common training set is cut into shards (a stand-in for hospitals with data of their own): with kind
    ``dirichlet`` class by class, with kind ``groups`` into whole groups of images, such as those of one patient. With
    kind ``own`` there is no common set, and each site brings its own images.

    ``by`` belongs to ``groups`` alone, ``alpha`` and ``balance`` to ``dirichlet``, ``min_size`` to both.
    """

    kind: Literal["dirichlet", "groups", "own"] = "dirichlet"
    by: str | None = Field(None, description="groups: the array train_BY of the file says who is alike")
    alpha: float = Field(0.3, gt=0, description="concentration of the per-class Dirichlet draw over peers")
    min_size: int = Field(10, ge=1, description="the draw is repeated until every shard has this many samples")
    balance: bool = Field(True, description="a peer that holds its even share already gets no more of later classes")

    @model_validator(mode="after")
    def _settings_are_of_this_kind(self) -> Self:
        if self.kind == OWN:
            if given := sorted(self.model_fields_set - {"kind"}):
                raise ValueError(f"'{given[0]}' with kind own, which cuts no shards; leave one of them out")
            return self
        if self.kind == "dirichlet":
            if self.by is not None:
                raise ValueError("'by' belongs to kind groups, and the kind is dirichlet; leave one of them out")
            return self
        for name in _OF_DIRICHLET:
            if name in self.model_fields_set:
                raise ValueError(f"'{name}' belongs to kind dirichlet, and the kind is groups; leave one of them out")
        if not self.by:
            raise ValueError(
                "'by' is missing, and kind groups needs it: with 'by: patient', the array train_patient of the .npz "
                "file says of every training image to which group it belongs"
            )
        return self

    def as_tree(self) -> dict[str, Any]:
        """Plain values, of the settings of one kind only those of this one."""
        if self.kind == OWN:
            return {"kind": OWN}
        others = {"by"} if self.kind == "dirichlet" else set(_OF_DIRICHLET)
        return self.model_dump(mode="json", exclude=others)

    def describe(self) -> str:
        """For people."""
        if self.kind == OWN:
            return "each peer's own images"
        return f"Dirichlet alpha {self.alpha:g}" if self.by is None else f"whole groups by {self.by}"


#: What kind ``groups`` has no use for.
_OF_DIRICHLET = ("alpha", "balance")


def _check_class(name: str) -> str:
    what = f"class name {name[:200]!r}"
    if not name or name != plain(name) or not name.isprintable() or len(name) > 200:
        raise ValueError(f"{what} must be text without spaces around it, of 1 to 200 characters")
    if "/" in name or is_litter(name):
        raise ValueError(f"{what} cannot be that of a directory of images: it has a '/', or is that of a hidden file")
    return name


class ImageSettings(_Model):
    """How pictures of any size and depth become the images that models see, where sites bring their own."""

    size: int = Field(28, ge=4, le=4096, description="side in pixels; scaled to a square, the aspect is not kept")
    channels: Literal[1, 3] = Field(3, description="1: colour becomes luma; 3: grey is repeated")
    window: tuple[int, int] | None = Field(None, description="values of 16-bit pictures that become black and white")

    @model_validator(mode="after")
    def _window_is_open(self) -> Self:
        if self.window is not None and self.window[0] >= self.window[1]:
            raise ValueError(f"window {list(self.window)} must be two whole numbers, the smaller one first")
        return self


class DataSettings(_Model):
    """The images, how they are split, and how training images are augmented."""

    dataset: Annotated[str, AfterValidator(_check_dataset)] = "digits"
    partition: PartitionSettings = PartitionSettings()
    holdout: float = Field(0.2, gt=0, lt=1, description="share of each shard held out, half to validate, half to test")
    samples: int | None = Field(None, ge=1, description="use at most so many training images in all, drawn by the seed")
    transfer_samples: int | None = Field(None, ge=1, description="cut so many images out before the shards, for all")
    augmentation: Literal["auto", "none", "crop", "crop_hflip", "hvflip"] = "auto"
    classes: tuple[Annotated[str, AfterValidator(_check_class)], ...] | None = Field(None, description="kind own")
    image: ImageSettings | None = Field(None, description="kind own")
    test: Annotated[str, AfterValidator(check_place)] | None = Field(None, description="kind own: a common test set")

    @property
    def is_own(self) -> bool:
        """Whether each site brings its own images."""
        return self.partition.kind == OWN

    @property
    def has_common_test(self) -> bool:
        """Whether there is a test set that is the same for all, and with it a global accuracy."""
        return not self.is_own or self.test is not None

    @property
    def words(self) -> str:
        """What is learned from, for a sentence."""
        return "own images" if self.is_own else self.dataset

    @property
    def image_settings(self) -> ImageSettings:
        """Of own images: as given, or the defaults."""
        return self.image or ImageSettings()

    @model_validator(mode="after")
    def _own_images_or_a_common_set(self) -> Self:
        if not self.is_own:
            for name in ("classes", "image", "test"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"'{name}' belongs to partition kind own, where each site brings its own images, and the kind "
                        f"is {self.partition.kind}; leave one of them out"
                    )
            return self
        if "dataset" in self.model_fields_set:
            raise ValueError(
                f"dataset '{self.dataset}' with partition kind own, where each site brings its own images; leave one "
                f"of them out"
            )
        for name in ("samples", "transfer_samples"):
            if getattr(self, name) is not None:
                raise ValueError(f"'{name}' is of one common data set, and partition kind own has none; leave it out")
        names = self.classes or ()
        if len(names) < 2:
            raise ValueError(
                f"'classes' must name all classes of the federation, 2 at least, as partition kind own needs it; found "
                f"{len(names)}"
            )
        seen: dict[str, str] = {}
        for name in names:
            same = name.casefold()
            if same in seen:
                raise ValueError(
                    f"classes '{seen[same]}' and '{name}' are the same, or differ in capitals only; rename one"
                )
            seen[same] = name
        return self

    def as_tree(self) -> dict[str, Any]:
        """Plain values; what the kind of partition has nothing to do with is left out."""
        tree = self.model_dump(mode="json")
        tree["partition"] = self.partition.as_tree()
        if self.transfer_samples is None:
            del tree["transfer_samples"]
        if not self.is_own:
            for name in ("classes", "image", "test"):
                del tree[name]
            return tree
        del tree["dataset"], tree["samples"]
        tree["image"] = self.image_settings.model_dump(mode="json")
        return tree

    @model_validator(mode="after")
    def _groups_stand_in_a_file(self) -> Self:
        if self.partition.by is not None and not self.dataset.startswith("npz:"):
            raise ValueError(
                f"the partition is of kind groups, and data set {self.dataset} has none: use a file, npz:PATH, with an "
                f"array train_{self.partition.by} that says of every training image to which group it belongs, or kind "
                f"dirichlet"
            )
        return self


class FedMkdSettings(_Model):
    """Of method ``fedmkd`` alone."""

    memory_weight: Literal["half", "uniform"] = Field("half", description="g: 1/2, or 1/(teachers + 1)")


class DfmlSettings(_Model):
    """Of method ``dfml`` alone."""

    mode: Literal["symmetric", "aggregator"] = Field("symmetric", description="who trains: all, or one a round for all")
    temperature: float = Field(1.0, gt=0, description="T of the pairwise divergences")
    alpha_min: float = Field(0.0, ge=0, le=1, description="least weight of the others")
    alpha_max: float = Field(0.8, ge=0, le=1, description="their largest weight")
    period: int = Field(10, ge=2, multiple_of=2, description="rounds from one least weight to the next")

    @model_validator(mode="after")
    def _alpha_rises(self) -> Self:
        if self.alpha_min > self.alpha_max:
            raise ValueError(f"alpha_min {self.alpha_min:g} is above alpha_max {self.alpha_max:g}")
        return self


class MsfkdSettings(_Model):
    """Of method ``msfkd`` alone."""

    keep_quantile: float = Field(0.5, ge=0, le=1, description="confidence below this quantile of all is not used")
    require_plurality: bool = Field(True, description="only those who say what most say; without a most, nobody")


class FedGdSettings(_Model):
    """Of method ``fedgd`` alone."""

    first: int = Field(20, ge=1, description="round in which images are made for the first time")
    every: int = Field(50, ge=2, description="rounds from one time to the next; at least one must learn from them")
    images: int = Field(500, ge=2, description="of all peers together, as many of each or one more")
    steps: int = Field(100, ge=1, description="of the generator, for each batch of images")
    weight: float = Field(1.0, gt=0, description="mu: how much the images count beside the own ones")

    def are_made_in(self, number: int) -> bool:
        """Whether a round ends with new images."""
        return number >= self.first and (number - self.first) % self.every == 0


class MethodSettings(_Model):
    """How teachers are combined, and how much they count (the paper's Section 3).

    What one method alone knows is in a section of its name; None takes its defaults.
    """

    name: Annotated[str, AfterValidator(_check_method)] = "crad"
    temperature: float = Field(3.0, gt=0, description="T of the softmax and of the loss, Eq. 9")
    distillation_weight: float = Field(0.7, ge=0, le=1, description="lambda of Eq. 9")
    min_support: int = Field(2, ge=1, description="validation samples a teacher needs to count for a class")
    empty_class: Literal["uniform", "zero", "student"] = "uniform"
    warmup_rounds: int = Field(0, ge=0, description="first rounds that learn from own labels only")
    fedmkd: FedMkdSettings | None = None
    dfml: DfmlSettings | None = None
    msfkd: MsfkdSettings | None = None
    fedgd: FedGdSettings | None = None

    @model_validator(mode="after")
    def _sections_are_of_this_method(self) -> Self:
        for section in _SECTIONS:
            if section != self.name and getattr(self, section) is not None:
                raise ValueError(
                    f"'{section}' belongs to method {section}, and the method is {self.name}; leave it out"
                )
        return self

    @property
    def traits(self) -> Traits:
        """What the method asks of the service and the client."""
        return METHODS[self.name]

    @property
    def making(self) -> FedGdSettings | None:
        """How the peers make their transfer set; None if they do not."""
        return (self.fedgd or FedGdSettings()) if self.traits.makes_transfer_set else None

    @property
    def aggregates(self) -> bool:
        """Whether one peer a round trains the models of all (:meth:`Federation.aggregator`)."""
        return self.dfml is not None and self.dfml.mode == "aggregator"

    @property
    def keeps_model(self) -> bool:
        """Whether a peer's model is in its own checkpoints, and not what it publishes."""
        return self.traits.publishes_predictions or self.aggregates

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a peer's model cannot be evaluated by what was published alone."""
        return self.traits.has_peak or self.keeps_model

    @property
    def why_not_given_back(self) -> str | None:
        """A part sentence: why nobody can give its model back to a peer that has lost it; None if others can."""
        if self.aggregates:
            return f"by method {self.name} with mode aggregator no peer publishes its own model by itself"
        return f"method {self.name} does not publish models" if self.traits.publishes_predictions else None

    def as_tree(self) -> dict[str, Any]:
        """Plain values; of the sections only that of the method, with all its fields."""
        tree = self.model_dump(mode="json")
        for section, model in _SECTIONS.items():
            own = getattr(self, section)
            del tree[section]
            if section == self.name:
                tree[section] = (model() if own is None else own).model_dump(mode="json")
        return tree


#: Methods with settings of their own.
_SECTIONS: dict[str, type[_Model]] = {
    "fedmkd": FedMkdSettings,
    "dfml": DfmlSettings,
    "msfkd": MsfkdSettings,
    "fedgd": FedGdSettings,
}


class TrainingSettings(_Model):
    """The local optimiser; it keeps its momentum across rounds."""

    batch_size: int = Field(64, ge=2)
    optimizer: Literal["sgd"] = "sgd"
    learning_rate: float = Field(0.01, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(5e-4, ge=0)
    clip_norm: float = Field(10.0, gt=0, description="global gradient norm above which a step is scaled down")
    evaluate_every: int = Field(10, ge=1, description="rounds between evaluations on the global test set")


class PrivacySettings(_Model):
    """Noise on what a peer says of its data; without it, the true class counts are published (docs/privacy.md)."""

    count_epsilon: float | None = Field(None, gt=0, description="class counts get Laplace noise of scale 1/epsilon")


class BarrierSettings(_Model):
    """When a round opens: with policy ``all``, once every peer's snapshot of the last round has been used; with
    ``quorum``, after the deadlines of those who are missing, if at least ``min`` peers are there.

    The other fields belong to ``quorum`` alone; None takes the default.
    """

    policy: Literal["all", "quorum"] = "all"
    min: int | None = Field(None, description="peers without which no round opens, by default just over half of all")
    max_staleness: int | None = Field(None, ge=0, description="rounds by which a teacher's weights may be old (2)")
    grace: float | None = Field(None, gt=0, description="seconds added to what is known of a peer's speed (15)")

    def quorum(self, peers: int) -> tuple[int, int, float]:
        """``min``, ``max_staleness`` and ``grace`` for a federation of so many peers."""
        return (
            peers // 2 + 1 if self.min is None else self.min,
            2 if self.max_staleness is None else self.max_staleness,
            15.0 if self.grace is None else self.grace,
        )

    @model_validator(mode="after")
    def _only_with_quorum(self) -> Self:
        for name in ("min", "max_staleness", "grace"):
            if self.policy == "all" and getattr(self, name) is not None:
                raise ValueError(f"'{name}' belongs to policy quorum, and the policy is all; leave one of them out")
        return self


class PeerEntry(_Model):
    """One member. ``address`` is where the others reach it; ``arch`` defaults to the pool, by id mod 3. ``data`` is
    where its own images are, for federations on one machine; it belongs to the host.
    """

    id: int = Field(ge=0, le=65535)
    address: Annotated[str, AfterValidator(check_address)]
    arch: Annotated[str, AfterValidator(_check_architecture)]
    data: Annotated[str, AfterValidator(check_place)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_arch(cls, value: Any) -> Any:
        if isinstance(value, dict) and "arch" not in value:
            number = value.get("id")
            # Whatever else stands there is the id's own error.
            return {**value, "arch": POOL[number % len(POOL) if type(number) is int else 0]}
        return value


class Federation(_Model):
    """The whole of peers.yaml."""

    federation: str = Field(pattern=FEDERATION_NAME)
    seed: int = Field(1024, ge=0, lt=2**63)
    rounds: int = Field(300, ge=1)
    participation: int | None = Field(None, description="peers that take part in a round, drawn anew each; all if None")
    data: DataSettings = DataSettings()
    method: MethodSettings = MethodSettings()
    training: TrainingSettings = TrainingSettings()
    privacy: PrivacySettings = PrivacySettings()
    barrier: BarrierSettings = BarrierSettings()
    peers: tuple[PeerEntry, ...]

    @model_validator(mode="after")
    def _peers_differ(self) -> Federation:
        if not self.peers:
            raise ValueError("peers: the list is empty; at least one peer is needed")
        for field in ("id", "address"):
            seen: set[Any] = set()
            for entry in self.peers:
                value = getattr(entry, field)
                if value in seen:
                    raise ValueError(f"peers: {field} {value!r} is given twice; every peer needs its own {field}")
                seen.add(value)
        return self

    @model_validator(mode="after")
    def _own_images_are_wanted(self) -> Federation:
        for entry in self.peers:
            if entry.data is not None and not self.data.is_own:
                raise ValueError(
                    f"peers: peer {entry.id} has its own images ('{entry.data}'), and data.partition.kind is "
                    f"{self.data.partition.kind}; set it to own, or leave 'data' out"
                )
        return self

    @model_validator(mode="after")
    def _quorum_is_a_majority(self) -> Federation:
        size, least = len(self.peers), self.barrier.min
        if least is not None and not size < 2 * least <= 2 * size:
            raise ValueError(
                f"barrier.min: {least} of {size} peers; it must be more than half, so that two halves of a broken "
                f"network cannot both go on, and not more than all: from {size // 2 + 1} to {size}"
            )
        return self

    @model_validator(mode="after")
    def _participation_fits(self) -> Federation:
        size, active = len(self.peers), self.participation
        if active is None:
            return self
        if size < 2:
            raise ValueError(f"participation: {active} of one peer; with less than two peers leave it out")
        if not 2 <= active <= size:
            raise ValueError(
                f"participation: {active} of {size} peers a round; it must be from 2, so that somebody teaches, to "
                f"{size}: change it, or leave it out for all peers in every round"
            )
        if self.barrier.policy == "quorum":
            raise ValueError(
                f"participation: {active} with barrier.policy quorum; the active peers of a round wait for one "
                f"another: leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _noise_covers_what_is_published(self) -> Federation:
        if self.privacy.count_epsilon is not None and self.method.traits.publishes_cross_entropy:
            raise ValueError(
                f"privacy.count_epsilon: method {self.method.name} publishes the cross-entropy of every class, "
                f"which noise on the counts does not cover, and which tells of a class without images: leave out one "
                f"of the two"
            )
        return self

    @model_validator(mode="after")
    def _predictions_have_a_transfer_set(self) -> Federation:
        name = self.method.name
        if not self.method.traits.publishes_predictions:
            return self
        if self.data.transfer_samples is None and self.method.making is None:
            if self.data.is_own:
                raise ValueError(
                    f"method: {name} compares predictions on a transfer set cut out of a common data set, and with "
                    f"data.partition.kind own there is none: choose another method"
                )
            raise ValueError(
                f"data.transfer_samples: it is missing, and method {name} compares predictions on a transfer set: set "
                f"it to a number of images, such as 500, that are cut out of the training set before the shards"
            )
        if self.participation is not None:
            raise ValueError(
                f"participation: {self.participation} with method {name}, which moves no models and takes the "
                f"predictions of all peers in every round: leave it out, or choose another method"
            )
        return self

    @model_validator(mode="after")
    def _images_are_made_and_used(self) -> Federation:
        making, name = self.method.making, self.method.name
        if making is None:
            return self
        if self.barrier.policy == "quorum":
            raise ValueError(
                f"barrier.policy: quorum with method {name}, whose peers all need the images of all others: a peer "
                f"that was left behind could not get them any more. Use policy all, or choose another method"
            )
        if making.images < len(self.peers):
            raise ValueError(
                f"method.{name}.images: {making.images} for {len(self.peers)} peers, each of which makes its part; "
                f"it must be at least {len(self.peers)}"
            )
        if making.first > self.rounds - 2:
            raise ValueError(
                f"method.{name}.first: images are first made in round {making.first} of {self.rounds}, passed on in "
                f"the next and learned from in the one after that, so nobody would ever learn from any: it must be at "
                f"most {self.rounds - 2}, with at least 3 rounds"
            )
        if self.method.warmup_rounds > making.first:
            raise ValueError(
                f"method.warmup_rounds: {self.method.warmup_rounds}, and images are first made in round "
                f"{making.first}, before which all rounds are private: it must be at most {making.first}, or "
                f"method.{name}.first larger"
            )
        return self

    @model_validator(mode="after")
    def _one_may_train_for_all(self) -> Federation:
        if not self.method.aggregates:
            return self
        mode = f"method.{self.method.name}.mode aggregator"
        if self.participation is not None:
            raise ValueError(
                f"participation: {self.participation} with {mode}, in which one peer a round trains the models of "
                f"all: leave it out, or choose mode symmetric"
            )
        if self.barrier.policy == "quorum":
            raise ValueError(
                f"barrier.policy: quorum with {mode}, in which nobody can go on without the one peer that trains the "
                f"models of all: use policy all, or mode symmetric"
            )
        if self.method.warmup_rounds:
            raise ValueError(
                f"method.warmup_rounds: {self.method.warmup_rounds} with {mode}, in which no peer trains by itself: "
                f"leave it out, or choose mode symmetric"
            )
        if self.rounds < 2:
            raise ValueError(
                f"rounds: {self.rounds} with {mode}, in which models that were trained in a round are taken up in the "
                f"next: at least 2 are needed"
            )
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        """All peer ids, ascending: the order in which teachers are summed."""
        return tuple(sorted(entry.id for entry in self.peers))

    def peer(self, peer_id: int, file: Path | None = None) -> PeerEntry:
        """The entry of one peer.

        Args:
            file: where this was read from, for the error.

        Raises:
            ConfigurationError: no entry has this id.
        """
        for entry in self.peers:
            if entry.id == peer_id:
                return entry
        name = "" if file is None else f" {file}"
        raise ConfigurationError(
            f"peer id {peer_id} is not in the federation file{name}; its ids are {_span(self.ids)}"
        )

    def place_of(self, peer_id: int, given: str | None = None) -> str:
        """Where a peer's own images are: as its host says or, if it does not, as its entry.

        Raises:
            ConfigurationError: nobody says it.
        """
        place = given or self.peer(peer_id).data
        if place is None:
            raise ConfigurationError(
                f"peer {peer_id}: data.partition.kind is own, and nobody says where the images of this peer are: give "
                f"'crad-peer --data folder:PATH' (or csv:PATH, npz:PATH), or write 'data: folder:PATH' at its entry in "
                f"the federation file, if all peers are on one machine"
            )
        return place

    def teachers_of(self, peer_id: int, round_number: int) -> tuple[int, ...]:
        """The peers whose newest snapshots teach ``peer_id`` in this round, ascending; none if it has no part in it."""
        if self.method.aggregates:
            return self._senders_to(peer_id, round_number)
        active, traits, making = self.active(round_number), self.method.traits, self.method.making
        untaught = max(self.method.warmup_rounds, traits.untaught_rounds if making is None else making.first)
        if not traits.has_teachers or round_number <= untaught or peer_id not in active:
            return ()
        return tuple(other for other in active if other != peer_id)

    def _senders_to(self, peer_id: int, round_number: int) -> tuple[int, ...]:
        """Where one trains for all: who has the models that a peer takes up. The first takes up the initial ones."""
        if round_number == 1 and self.aggregator(1) == peer_id:
            return tuple(other for other in self.ids if other != peer_id)
        sender = self.aggregator(round_number - 1)
        return () if sender is None or sender == peer_id else (sender,)

    def aggregator(self, round_number: int) -> int | None:
        """Who trains the models of all in a round; None if nobody does.

        As often one as another: an order of all is drawn, and when all have been it is drawn anew. After the last round
        nobody would take the models up, so nobody trains in it.
        """
        if not self.method.aggregates or not 1 <= round_number < self.rounds:
            return None
        turn, place = divmod(round_number - 1, len(self.peers))
        return _drawn_order(self.ids, self.seed, turn)[place]

    def published_by(self, peer_id: int, round_number: int) -> str:
        """What a peer publishes in a round, as the key of its tensor layout in the learner's ``ready``.

        The key of a model is its architecture. Where peers make the transfer set, it is ``images-`` and their number
        in the rounds in which they do, then predictions, and the digest of the model before. Where one trains for all,
        that one has the bundle of all models, and the others their digest; at first each has its model. See
        :mod:`crad_p2p.methods`.
        """
        if self.method.aggregates and round_number > 0:
            return BUNDLE if self.aggregator(round_number) == peer_id else MODEL_DIGEST
        making = self.method.making
        if making is None:
            return PREDICTIONS if self.method.traits.publishes_predictions else self.peer(peer_id).arch
        if making.are_made_in(round_number):
            return self.images_key(peer_id)
        return PREDICTIONS if round_number > making.first else MODEL_DIGEST

    def kinds_of(self, peer_id: int) -> frozenset[str]:
        """All that a peer publishes, by :meth:`published_by`."""
        return frozenset(self.published_by(peer_id, number) for number in range(self.rounds + 1))

    def images_key(self, peer_id: int) -> str:
        """The key of a peer's images."""
        return f"{IMAGES}-{self.images_of(peer_id)}"

    def images_of(self, peer_id: int) -> int:
        """How many of the transfer set a peer makes; 0 where they make none."""
        making = self.method.making
        if making is None:
            return 0
        share, more = divmod(making.images, len(self.peers))
        return share + (self.ids.index(peer_id) < more)

    @property
    def transfer_size(self) -> int:
        """Images of the set on which peers compare predictions; 0 where they compare none."""
        if self.method.making is not None:
            return self.method.making.images
        return (self.data.transfer_samples or 0) if self.method.traits.publishes_predictions else 0

    @property
    def schedule(self) -> Schedule | None:
        """Who takes part in which round; None if always everybody does."""
        active = self.participation
        return None if active is None else drawn_schedule(self.ids, self.rounds, self.seed, active)

    def part_of(self, peer_id: int) -> Part | None:
        """The schedule as one peer sees it; None if always everybody takes part."""
        found = self.schedule
        return None if found is None else Part(found, peer_id)

    def active(self, round_number: int) -> tuple[int, ...]:
        """The peers that publish this round, ascending."""
        found = self.schedule
        return self.ids if found is None else found.active(round_number)

    def version(self, peer_id: int, round_number: int) -> int:
        """The round of a peer's newest snapshot once all rounds up to this one are over."""
        found = self.schedule
        return round_number if found is None else found.version(peer_id, round_number)

    def done_through(self, peer_id: int, last: int) -> int:
        """The last round of which nothing more is to come from a peer that has published ``last``."""
        found = self.schedule
        if found is None or last < 0:
            return last
        following = found.following(peer_id, last)
        return self.rounds if following is None else following - 1

    def evaluates_after(self, round_number: int) -> bool:
        """Whether the global test set is due: every ``evaluate_every`` rounds, and after the last, if there is one."""
        if not self.data.has_common_test:
            return False
        return round_number > 0 and (round_number % self.training.evaluate_every == 0 or round_number == self.rounds)

    def as_tree(self) -> dict[str, Any]:
        """Plain values, as in the file. What came later is left out where it is not used: so is its name."""
        tree = self.model_dump(mode="json")
        if self.participation is None:
            del tree["participation"]
        tree["data"] = self.data.as_tree()
        tree["method"] = self.method.as_tree()
        for entry in tree["peers"]:
            if entry["data"] is None:
                del entry["data"]
        return tree

    def agreed(self) -> dict[str, Any]:
        """The fields that all peers must have alike, flat: ``{"method.temperature": 3.0, "peers.0.arch": …}``.

        Addresses are left out, since sites may see each other under different ones, and of an ``npz:`` data set only
        the file's name counts, since its folder belongs to the host; of own images, where they are belongs to the host
        altogether, and of a common test set it counts that there is one.
        """
        tree = self.as_tree()
        tree["peers"] = {str(entry.pop("id")): entry for entry in tree["peers"]}
        for entry in tree["peers"].values():
            entry.pop("data", None)
        data = tree["data"]
        if self.data.is_own:
            data["classes"] = {str(number): name for number, name in enumerate(data["classes"])}
            window = data["image"]["window"] or (None, None)
            data["image"]["window"] = dict(zip(("0", "1"), window, strict=True))
            data["test"] = self.data.test is not None
        elif data["dataset"].startswith("npz:"):
            data["dataset"] = "npz:" + PurePath(data["dataset"].removeprefix("npz:")).name
        return dict(sorted(_flatten(tree)))

    def places(self) -> dict[str, str | None]:
        """Where the images are on this machine, with folders: what :meth:`agreed` leaves out, by the same names."""
        if not self.data.is_own:
            return {"data.dataset": self.data.dataset}
        own = {f"peers.{entry.id}.data": entry.data for entry in self.peers}
        return {"data.test": self.data.test, **own}

    def digest(self) -> str:
        """The identity of the run."""
        return digest_of(self.agreed())


@lru_cache(maxsize=64)
def _drawn_order(ids: tuple[int, ...], seed: int, turn: int) -> tuple[int, ...]:
    """Each peer draws a number of its own; no generator's algorithm has a say in it."""
    drawn = {peer: drawn_number(seed, "aggregator", peer=peer, round_number=turn) for peer in ids}
    return tuple(sorted(ids, key=drawn.__getitem__))


def digest_of(agreed: dict[str, Any]) -> str:
    """sha256 (hex) of a federation's agreed fields as canonical JSON."""
    canonical = json.dumps(agreed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        elif key not in _HOST_FIELDS:
            yield prefix + key, value


def _span(ids: tuple[int, ...]) -> str:
    consecutive = ids == tuple(range(ids[0], ids[0] + len(ids))) and len(ids) > 2
    return f"{ids[0]} to {ids[-1]}" if consecutive else ", ".join(map(str, ids))


def describe_difference(found: dict[str, Any], expected: dict[str, Any], there: str, here: str) -> str | None:
    """The first field in which two sets of agreed fields differ, with both values; None if they do not."""
    absent = object()
    for name in sorted(found.keys() | expected.keys()):
        theirs, ours = found.get(name, absent), expected.get(name, absent)
        if theirs != ours:
            values = [
                f"{'absent' if v is absent else json.dumps(v)} in {place}"
                for v, place in ((theirs, there), (ours, here))
            ]
            return f"{name} is {values[0]} and {values[1]}"
    return None


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT names this machine only (a loopback literal, or ``localhost``)."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a repeated key silently win; here it is an error. And 1e-2 is a number, which in YAML 1.1 is text."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        merge = "tag:yaml.org,2002:merge"  # "<<: *anchor" may stand beside the keys it brings
        seen = set()
        for key in (self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge):
            if not isinstance(key, Hashable):
                continue  # refused by whoever builds the mapping
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key}' is given twice", problem_mark=node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), [*"-+0123456789"]
)


def read_fields(path: Path) -> dict[Any, Any]:
    """The fields of a YAML file, not looked at yet.

    Raises:
        ConfigurationError: the file cannot be read, is not YAML, or holds no fields.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(f"{path}: cannot be read ({reason}); 'crad-mesh init' writes such a file") from None
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"{path}: is not UTF-8 text; expected a YAML file as 'crad-mesh init' writes"
        ) from None
    try:
        tree = yaml.load(text, Loader=_UniqueKeyLoader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(f"{path}{where}: is not valid YAML: {error.problem}") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: is nested too deeply; expected a file as 'crad-mesh init' writes") from None
    except (ValueError, TypeError) as error:  # a date that is none, a number of 5,000 digits, a list as key
        raise ConfigurationError(f"{path}: is not valid YAML: {printable(str(error))}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}: must hold fields such as 'federation' and 'peers'; found {_kind(tree)}")
    return tree


def load_federation(path: Path, data_dir: Path | None = None) -> Federation:
    """Read peers.yaml. The relative path of an ``npz:`` data set or a common test set is taken from ``data_dir``, by
    default the folder of the file; those of peers' own images always from there.

    Raises:
        ConfigurationError: the file cannot be read, is not YAML, or has a wrong field; the text names file and field.
    """
    federation = build_federation(read_fields(path), str(path))
    data, base = federation.data, data_dir or path.parent
    places = {"dataset": data.dataset} if data.dataset.startswith("npz:") else {"test": data.test}
    absolute = {name: absolute_place(place, base) for name, place in places.items() if place is not None}
    entries = tuple(
        entry if entry.data is None else entry.model_copy(update={"data": absolute_place(entry.data, path.parent)})
        for entry in federation.peers
    )
    if not absolute and entries == federation.peers:
        return federation
    return federation.model_copy(
        update={"data": data.model_copy(update=absolute) if absolute else data, "peers": entries}
    )


def build_federation(tree: dict[str, Any], source: str) -> Federation:
    """Validate a tree of plain values; ``source`` (a file, or "the command line") opens each error.

    Raises:
        ConfigurationError: one sentence that names the first wrong field, what is allowed and what was found.
    """
    try:
        document = json.dumps(tree, default=str)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{source}: holds something that is no plain field: {printable(str(error))}") from None
    try:
        return Federation.model_validate_json(document)
    except ValidationError as error:
        raise ConfigurationError(f"{source}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    details = error.errors(include_url=False)
    first = details[0]
    field = ".".join(map(str, first["loc"]))
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    if first["type"] == "extra_forbidden":
        parent, name = first["loc"][:-1], str(first["loc"][-1])
        return f"'{field}' is not a field{_suggest(name, _fields_at(parent))}{more}"
    if first["type"] == "missing":
        return f"'{field}' is missing; it is required{more}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{field + ': ' if field else ''}{message}{more}"
    if first["type"] in ("model_type", "model_attributes_type"):
        message = f"must hold the fields {', '.join(_fields_at(first['loc']))}"
    elif first["type"] == "string_pattern_mismatch":
        message = "must be lower-case letters, digits and hyphens, 63 at most"
    else:
        message = message.replace("Input should be", "must be", 1)
    return f"'{field}': {message}, found {first['input']!r}{more}"


def _fields_at(location: tuple[int | str, ...]) -> tuple[str, ...]:
    model: type[BaseModel] = Federation
    for part in location:
        if isinstance(part, int):
            continue
        annotation: Any = model.model_fields[part].annotation  # a model, or one in a tuple, or one that may be absent
        model = next(
            each
            for each in (annotation, *get_args(annotation))
            if isinstance(each, type) and issubclass(each, BaseModel)
        )
    return tuple(model.model_fields)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
