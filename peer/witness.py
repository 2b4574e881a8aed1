"""What this peer has seen the others publish: no one may come back behind it, or show other bytes for it.

Without a server nobody can keep a peer from showing different snapshots of one round to different peers. But every
manifest names the digests that its round has used, so one round later all can compare: the first digest that is known
of a (peer, round) counts, and another one is a :class:`Conflict`, with both sources named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from crad_p2p.manifest import Manifest


@dataclass(frozen=True)
class Sighting:
    """The newest snapshot of a peer that has been here."""

    round: int
    sha256: str


@dataclass(frozen=True)
class Conflict:
    """Two digests of one (peer, round), and who says each."""

    peer: int
    round: int
    first: str
    first_source: str
    second: str
    second_source: str

    def __str__(self) -> str:
        return (
            f"two different snapshots of round {self.round} of peer {self.peer} are about: {self.first[:12]}… "
            f"({self.first_source}) and {self.second[:12]}… ({self.second_source}); peer {self.peer} has published "
            f"twice, or one of those who say so is wrong"
        )


class Witness:
    """Digests by (peer, round), and the newest sighting of every peer.

    Args:
        sightings: what was remembered durably before this start.
    """

    def __init__(self, sightings: dict[int, Sighting]) -> None:
        self.sightings = dict(sightings)
        self._digests: dict[tuple[int, int], tuple[str, str]] = {
            (peer, seen.round): (seen.sha256, "seen here before the last start") for peer, seen in sightings.items()
        }

    def compare(self, peer: int, number: int, sha256: str, source: str) -> Conflict | None:
        """Take in a digest; what it contradicts, if anything."""
        first, first_source = self._digests.setdefault((peer, number), (sha256, source))
        return None if first == sha256 else Conflict(peer, number, first, first_source, sha256, source)

    def compare_consumed(self, manifest: Manifest) -> list[Conflict]:
        """Compare what a peer says it has used with what is known here."""
        source = f"taught round {manifest.round} of peer {manifest.peer}"
        found = (self.compare(each.peer, each.round, each.sha256, source) for each in manifest.consumed)
        return [conflict for conflict in found if conflict is not None]

    def saw(self, peer: int, number: int, sha256: str) -> bool:
        """A checked snapshot is here; whether it is newer than the sighting so far."""
        before = self.sightings.get(peer)
        if before is not None and before.round >= number:
            return False
        self.sightings[peer] = Sighting(number, sha256)
        return True

    def is_behind(self, peer: int, number: int) -> bool:
        """Whether a peer says that its last round is before one that has been here."""
        return peer in self.sightings and number < self.sightings[peer].round

    def forget_before(self, first: Callable[[int], int]) -> None:
        """Drop digests of rounds that nobody will speak of any more: those before ``first`` of their peer."""
        for peer, at in [key for key in self._digests if key[1] < first(key[0])]:
            del self._digests[peer, at]
