"""What can happen to a peer, and what can follow: the words between the barrier and those who carry its decisions out.

Plain frozen values, each with a JSON form, so that a service can record them and a recording can be replayed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """The time, in seconds of the peer's own monotonic clock. The barrier knows of no other."""

    now: float


@dataclass(frozen=True)
class Connected:
    """The link to a peer is up, and both have found that they run the same and remember the same of each other."""

    peer: int


@dataclass(frozen=True)
class Disconnected:
    """The link to a peer is down."""

    peer: int


@dataclass(frozen=True)
class Announced:
    """A peer says that it has published this round; ``busy`` are the seconds that it worked for it, 0 if unknown."""

    peer: int
    round: int
    busy: float = 0.0


@dataclass(frozen=True)
class ManifestHeld:
    """A peer's manifest of a round is here and has been checked."""

    peer: int
    round: int


@dataclass(frozen=True)
class SnapshotHeld:
    """A peer's snapshot of a round is here and has been checked.

    ``model_round`` is the round in which its weights were trained, if not that one: a peer that comes back publishes
    its last model again under the mesh's round.
    """

    peer: int
    round: int
    model_round: int | None = None


@dataclass(frozen=True)
class SnapshotRefused:
    """A peer's snapshot of a round is what its manifest announces, and must not be used.

    With ``manifest`` that is known of the manifest already, so that neither of the two is waited for.
    """

    peer: int
    round: int
    manifest: bool = False


@dataclass(frozen=True)
class Gone:
    """A peer does not keep this round (any more), or has left after the last one: its snapshot will not come."""

    peer: int
    round: int


@dataclass(frozen=True)
class LearnerUp:
    """A learner process is ready and holds the model of the last published round; it remembers no teacher."""


@dataclass(frozen=True)
class LearnerDown:
    """The learner process has ended; what it had not finished is lost."""


@dataclass(frozen=True)
class Taught:
    """The learner has the posteriors of a peer's snapshot of ``round``, or refused it (``usable`` false)."""

    peer: int
    round: int
    usable: bool


@dataclass(frozen=True)
class Published:
    """This peer's round is committed: the rename has happened. ``busy`` are the seconds that it worked for it."""

    round: int
    busy: float = 0.0


Event = (
    Tick
    | Connected
    | Disconnected
    | Announced
    | ManifestHeld
    | SnapshotHeld
    | SnapshotRefused
    | Gone
    | LearnerUp
    | LearnerDown
    | Taught
    | Published
)

# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FetchManifest:
    peer: int
    round: int


@dataclass(frozen=True)
class FetchSnapshot:
    peer: int
    round: int


@dataclass(frozen=True)
class MakeInitialModel:
    """Let the learner make round 0."""


@dataclass(frozen=True)
class OpenRound:
    """Let the learner draw the local epoch of this round."""

    round: int


@dataclass(frozen=True)
class Teach:
    """Let the learner run a peer's snapshot of ``round`` over the open epoch."""

    peer: int
    round: int


@dataclass(frozen=True)
class Collected:
    """The manifests of this round are here from everybody who is waited for: the best round can be decided."""

    round: int


@dataclass(frozen=True)
class Train:
    """The barrier is passed: train this round.

    ``teachers`` and ``quarantined`` (refused) and ``missing`` are all others that may teach, each once, ascending;
    ``quarantined`` also names those who may not teach yet and whose snapshot was refused.
    ``stale`` names those teachers whose weights are older than the last round, with the round of their snapshot.
    """

    round: int
    teachers: tuple[int, ...]
    quarantined: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    stale: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Rejoin:
    """The mesh went on without this peer: publish the last model again, as this round, and go on from there."""

    round: int


@dataclass(frozen=True)
class GiveUp:
    """The start wait is over, and too few have ever been reached; ``missing`` are those that have not."""

    missing: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """The last round is published here and collected from everybody who is waited for."""


@dataclass(frozen=True)
class Release:
    """Everything that this peer wants of the others is here, snapshots of the last round included: they may leave."""


Decision = (
    FetchManifest
    | FetchSnapshot
    | MakeInitialModel
    | OpenRound
    | Teach
    | Collected
    | Train
    | Rejoin
    | GiveUp
    | Finish
    | Release
)

# --- JSON -------------------------------------------------------------------------------------------------------------

_EVENTS = {kind.__name__: kind for kind in Event.__args__}


def to_json(item: Event | Decision) -> dict[str, Any]:
    """``{"is": "Announced", "peer": 1, …}``"""
    return {"is": type(item).__name__, **asdict(item)}


def event_from_json(tree: dict[str, Any]) -> Event:
    """The event that :func:`to_json` wrote.

    Raises:
        ValueError: it is none.
    """
    fields = dict(tree)
    try:
        event: Event = _EVENTS[fields.pop("is")](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an event: {tree} ({error})") from None
    return event
