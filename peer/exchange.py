"""Everything between this peer and the others: links, what they say, what is fetched, and what is remembered."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from crad_p2p.errors import IncompleteError, PeersDisagreeError
from crad_p2p.federation import Federation
from crad_p2p.foreign import printable
from crad_p2p.manifest import Consumed, Manifest
from crad_p2p.snapshot import DamagedFileError, SnapshotError
from peer import events as e
from peer._proto.crad.v1 import peer_pb2
from peer.channels import Waits
from peer.hello import describe_data_difference
from peer.intake import Intake, document_digest, require_same_counts
from peer.link import Link, RoundGoneError, greeting_slots
from peer.standstill import LONG, Way
from peer.status import Status
from peer.store import Store
from peer.tls import Tls
from peer.turns import Slots
from peer.waiting import to_the_end, within
from peer.witness import Conflict, Witness

logger = logging.getLogger(__name__)

#: Snapshots fetched at the same time, as long as each is done within so many seconds; more would only share the same
#: line.
_PARALLEL_FETCHES, _FAST = 4, 5.0
#: Seconds after which a peer that does not keep what is needed is asked again, and evidence of a mesh that is ahead.
_ASK_AGAIN = 5.0
#: Times that a snapshot of the last round, from which nobody learns, may come damaged.
_COPY_TRIES = 5
#: Snapshots that a peer may show for one round and not have any more: each is evidence, and a line in the lineage.
_REPLACEMENTS = 5


class Exchange:
    """The other peers, seen from here. What happens is told as events of the barrier.

    Args:
        tls: this peer's certificate; None for plain text.
        tell: takes the events.
        spawn: starts a task whose error ends this peer.
        may_lose: whether a round that its owner does not keep any more can be done without (policy ``quorum``).
    """

    def __init__(
        self,
        federation: Federation,
        own_id: int,
        store: Store,
        status: Status,
        witness: Witness,
        waits: Waits,
        *,
        tls: Tls | None,
        tell: Callable[[e.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        may_lose: bool,
    ) -> None:
        self.collected_by = {peer: -1 for peer in federation.ids if peer != own_id}
        self.reasons: dict[int, str] = {}  # why the last snapshot of a peer that was refused was refused
        self.served = store.load_served()  # have collected everything once, perhaps before this start
        self._federation = federation
        self._id = own_id
        self._store = store
        self._status = status
        self._witness = witness
        self._tell = tell
        self._spawn = spawn
        self._may_lose = may_lose
        self._latest_states: dict[int, peer_pb2.PeerState] = {}
        self._newest: dict[int, Manifest] = {}  # without its teachers: of N peers those are N times N, in memory
        self._counts: dict[int, tuple[int, ...]] = {}  # n of every class, which a peer never changes
        self._shown: dict[int, tuple[int, str]] = {}  # the round and digest of the last manifest
        self._have_same_data: set[int] = set()
        self._have_other_data: set[int] = set()
        self._behind: set[int] = set()
        self._replaced: dict[int, tuple[int, int]] = {}  # the last round of a peer that was, and how often
        self._left: set[int] = set()  # they said so
        self._moved: dict[int, tuple[int, float]] = {}  # snapshot bytes of each, and when there were more
        self._fetches: dict[e.FetchManifest | e.FetchSnapshot, asyncio.Task[None]] = {}
        self._intake: Intake
        self._has_proven_data = False  # that these are the data with which this peer has trained before
        self._intake_known = asyncio.Event()
        self._seen_saved = asyncio.Lock()
        self._seen_unsaved = False
        slots, greetings = Slots(_PARALLEL_FETCHES, _FAST), greeting_slots(len(federation.peers))
        self._links = {
            peer: Link(
                federation,
                own_id,
                peer,
                waits,
                on_hello=self._on_hello,
                on_state=self._on_state,
                on_connection=lambda j, up: tell(e.Connected(j) if up else e.Disconnected(j)),
                tls=tls,
                has_agreed=self._have_all_agreed(),
                slots=slots,
                greetings=greetings,
            )
            for peer in self.collected_by
        }

    @property
    def bytes_received(self) -> int:
        """Snapshot bytes from all others since the start."""
        return sum(link.bytes_received for link in self._links.values())

    @property
    def transfer_seconds(self) -> float:
        """Seconds that transfers took since the start; of those that ran at the same time each counts."""
        return sum(link.transfer_seconds for link in self._links.values())

    def watch(self) -> list[asyncio.Task[None]]:
        """Begin to follow all others. What is on disk of them counts as announced: it need not be asked for."""
        for peer in self._links:
            if (newest := self._store.newest_received(peer)) is not None:
                self._newest[peer] = _without_teachers(newest)
                self._counts[peer] = newest.statistics.counts
                self._tell(e.Announced(peer, newest.round))
        return [self._spawn(link.watch()) for link in self._links.values()]

    def troubles(self) -> list[str]:
        """What is known of peers that cannot be reached, a part sentence each."""
        return [f"peer {peer}: {link.trouble}" for peer, link in self._links.items() if link.trouble]

    def ways(self, followed_since: Mapping[int, float]) -> dict[int, Way]:
        """How all others are reached now; to be called every few seconds.

        Args:
            followed_since: since when, on the monotonic clock, those watch that watch this peer.
        """
        return {peer: self._way(link, followed_since.get(peer, -math.inf)) for peer, link in self._links.items()}

    def _way(self, link: Link, followed_since: float) -> Way:
        if link.down_since is not None:
            calls_since = followed_since if followed_since >= link.down_since else None
            return Way(link.address, link.down_since, link.reason, calls_since)
        state = self._latest_states.get(link.peer, peer_pb2.PeerState())
        now, (count, since) = time.monotonic(), self._moved.get(link.peer, (0, -math.inf))
        if link.bytes_received > count:
            since = now
            self._moved[link.peer] = link.bytes_received, since
        is_busy = state.phase not in ("", "wait") or now < since + LONG
        return Way(link.address, None, is_busy=is_busy, says=state.explanation)

    def renew(self) -> None:
        """This peer has a new certificate: connect anew with it."""
        for link in self._links.values():
            link.renew()

    def call_back(self, peer: int) -> None:
        """The peer has called: if there is no connection to it, one should come about now."""
        self._links[peer].call_back()

    async def close(self) -> None:
        """Close all links."""
        for link in self._links.values():
            await link.close()

    def use(self, intake: Intake, data: peer_pb2.Data, *, has_proven_data: bool = True) -> None:
        """Now that the learner is there it is known what may come in, and which data are common."""
        self._intake = intake
        self._has_proven_data = has_proven_data
        if self._may_lose and not self._intake_known.is_set():
            for peer in self._links:
                self._spawn(self._tell_held(peer))
        self._intake_known.set()
        self._status.show_data(data)
        for peer in self._latest_states:
            self._compare_data(peer)
            self._compare_manifest(peer)

    # --- what they say ---------------------------------------------------------------------------------------------

    def _on_hello(self, peer: int, reply: peer_pb2.HelloReply) -> None:
        refuse_rollback(self._store, peer, reply, self._federation)

    def _on_state(self, peer: int, state: peer_pb2.PeerState) -> None:
        self._latest_states[peer] = state
        self._compare_data(peer)
        self._compare_round(peer, state.round)
        self._compare_manifest(peer)
        self.collected_by[peer] = state.collected
        if state.collected >= self._federation.rounds and peer not in self.served:
            self.served.add(peer)
            self._store.save_served(self.served)
        self._tell(e.Announced(peer, state.round, max(0.0, state.busy_seconds)))
        if state.leaving and state.round == self._final(peer):
            self._lose_last(peer)
        else:
            self._left.discard(peer)  # it was started again

    def _compare_data(self, peer: int) -> None:
        """Both sides cut the common data by themselves; what they got must be the same.

        Before round 1 the first difference ends both. Later it is the affair of who was started with other data; only
        who does not know what data it had, since its disk was lost, may be that itself: if most say so, and not one.

        Raises:
            PeersDisagreeError: the data here are not those of the run.
        """
        here, there = self._status.state, self._latest_states[peer]
        if not here.HasField("data") or not there.HasField("data"):
            return
        difference = describe_data_difference(there.data, here.data, peer, self._id)
        if difference is None:
            self._have_same_data.add(peer)
            if not self._has_proven_data:
                self._has_proven_data = True
                self._store.remember_data()
            return
        is_news = peer not in self._have_other_data
        self._have_other_data.add(peer)
        are_most = 2 * len(self._have_other_data) > len(self._links)
        may_be_wrong = not self._have_all_agreed() or (not self._has_proven_data and are_most)
        if may_be_wrong and peer not in self._have_same_data:
            raise PeersDisagreeError(f"peers {self._id} and {peer} have different data: {difference}", peer=peer)
        if is_news:
            logger.warning("peer %d has other data than this peer: %s", peer, difference)

    def _have_all_agreed(self) -> bool:
        """Whether a round was trained, for which all who took part must have had the same settings and data."""
        return self._store.last_round() >= 1

    def _compare_round(self, peer: int, number: int) -> None:
        if not self._witness.is_behind(peer, number) or self._latest_states[peer].phase == "recover":
            self._behind.discard(peer)
        elif peer not in self._behind:
            self._behind.add(peer)
            logger.warning(
                "peer %d came back %s, but its round %d has been here: its disk has lost rounds. It is not used until "
                "its operator has started it with --recover",
                peer,
                f"at round {number}" if number >= 0 else "without any round",
                self._witness.sightings[peer].round,
            )

    def _compare_manifest(self, peer: int) -> None:
        """Look at what a peer shows now, also where nothing of it has to be fetched (any more)."""
        state = self._latest_states[peer]
        shown = state.round, document_digest(state.manifest)
        if not self._intake_known.is_set() or self._shown.get(peer) == shown:
            return
        self._shown[peer] = shown
        # What is further ahead is looked at when it is fetched, if it ever is.
        if 0 <= state.round <= self._status.state.round + 1:
            with suppress(SnapshotError):  # said when it is fetched
                self._examine(self._checked(state.manifest, peer, state.round))

    # --- what is fetched -------------------------------------------------------------------------------------------

    def fetch(self, what: e.FetchManifest | e.FetchSnapshot) -> None:
        """Begin to fetch; told as held, refused or gone."""
        if what.peer in self._left and what == e.FetchSnapshot(what.peer, self._final(what.peer)):
            self._tell(e.Gone(what.peer, what.round))
            return
        under_way = self._fetches.get(what)
        if under_way is not None and not under_way.done():  # asked for again in the next round: it will tell
            return
        if isinstance(what, e.FetchManifest) and self._is_ahead(what.round):  # an earlier claim of it is out of date
            for earlier, task in self._fetches.items():
                if isinstance(earlier, e.FetchManifest) and earlier.peer == what.peer and self._is_ahead(earlier.round):
                    task.cancel()
        task = self._fetches[what] = self._spawn(self._fetch_or_lose(what))
        task.add_done_callback(lambda done: self._fetches.pop(what) if self._fetches.get(what) is done else None)

    def _lose_last(self, peer: int) -> None:
        """A peer has left: what is not here of its last round, which nobody learns from, will not come any more."""
        self._left.add(peer)
        final = self._final(peer)
        if (task := self._fetches.get(e.FetchSnapshot(peer, final))) is not None:
            task.cancel()
        self._tell(e.Gone(peer, final))

    async def forget_before(self, number: int) -> None:
        """End fetches of older rounds: nobody waits for them any more, and their files are about to be deleted."""
        old = [task for what, task in self._fetches.items() if what.round < self._due(what.peer, number)]
        for task in old:
            task.cancel()
        if old:
            await asyncio.wait(old)
        self._witness.forget_before(lambda peer: self._due(peer, number - 1))

    def _due(self, peer: int, number: int) -> int:
        """The round of a peer's snapshot that stands for it in this round; beyond the last, that round itself."""
        return number if not 0 <= number <= self._federation.rounds else self._federation.version(peer, number)

    def _final(self, peer: int) -> int:
        """The last round that a peer publishes."""
        return self._federation.version(peer, self._federation.rounds)

    async def _fetch_or_lose(self, what: e.FetchManifest | e.FetchSnapshot) -> None:
        """Fetch; what its owner does not keep is given up where that can be, and else waited for."""
        is_copy = what == e.FetchSnapshot(what.peer, self._final(what.peer))
        is_said = False
        while True:
            try:
                if isinstance(what, e.FetchManifest):
                    await self._fetch_manifest(what.peer, what.round)
                else:
                    await self._fetch_snapshot(what.peer, what.round)
                return
            except (RoundGoneError, DamagedFileError) as error:
                if self._may_lose or is_copy:
                    reason = "it does not keep it any more" if isinstance(error, RoundGoneError) else error
                    logger.info("going on without round %d of peer %d: %s", what.round, what.peer, reason)
                    self._tell(e.Gone(what.peer, what.round))
                    return
                if not is_said:  # its owner may have lost rounds, or lie; that is no reason to end here
                    is_said = True
                    logger.warning("%s; waiting for it", error)
            await asyncio.sleep(_ASK_AGAIN)

    async def _fetch_manifest(self, peer: int, number: int) -> None:
        await self._intake_known.wait()
        manifest = await self._held_or_fetched(peer, number)
        if manifest is None:
            return
        if number == self._final(peer):  # when its owner has left it cannot be fetched again
            await asyncio.to_thread(self._store.make_received_durable, peer, number)
        self._examine(manifest)
        if peer not in self._newest or self._newest[peer].round < number:
            self._newest[peer] = _without_teachers(manifest)
        if self._is_ahead(number) and not await self._see_majority(peer, number):
            return
        self._tell(e.ManifestHeld(peer, number))

    async def _held_or_fetched(self, peer: int, number: int) -> Manifest | None:
        """The manifest of a peer's round, which is here then; None if it must not be used, which is told."""
        manifest = self._held_manifest(peer, number)
        if manifest is None:
            manifest = self._watched_manifest(peer, number)
            try:
                if manifest is None:
                    manifest = await self._fetched_manifest(peer, number)
                # Again, since another round of it may have come meanwhile: the first one that came is what counts.
                require_same_counts(manifest.statistics.counts, self._counts.get(peer, manifest.statistics.counts))
            except SnapshotError as error:
                self._refuse_manifest(peer, number, error)
                return None
            self._counts[peer] = manifest.statistics.counts
            self._store.save_received_manifest(manifest)
        return manifest

    async def _fetched_manifest(self, peer: int, number: int) -> Manifest:
        """From its owner, who keeps it, unless it has lost its disk since; with partial participation others do, too.

        Raises:
            RoundGoneError: nobody who answers has it.
        """
        counts = self._counts.get(peer)
        try:
            return await self._links[peer].manifest(number, self._intake, counts=counts)
        except RoundGoneError:
            if self._federation.participation is None:
                raise
            for other in self._links.keys() - {peer}:
                with suppress(RoundGoneError, SnapshotError, TimeoutError):
                    asked = self._links[other].manifest(number, self._intake, peer, counts=counts)
                    return await within(_ASK_AGAIN, asked)
            raise

    def _is_ahead(self, number: int) -> bool:
        return self._may_lose and number > self._status.state.round + 1

    async def _see_majority(self, peer: int, number: int) -> bool:
        """Wait until as many peers as a round needs are known to have published the round before this one.

        One that claims to be far ahead must not make this peer skip rounds. Who really is has the manifests of those
        with whom it went on, signed by each; False if this peer has come as far by itself.
        """
        least = self._federation.barrier.quorum(len(self._federation.peers))[0]
        while self._is_ahead(number):
            seen = {peer} | {j for j, newest in self._newest.items() if newest.round >= number - 1}
            for j in self._links:
                if j not in seen and len(seen) < least and await self._shows(peer, j, number - 1):
                    seen.add(j)
            if len(seen) >= least:
                return True
            await asyncio.sleep(_ASK_AGAIN)
        return False

    async def _shows(self, holder: int, owner: int, number: int) -> bool:
        """Whether a peer has a manifest of another one's round, signed by that one."""
        asked = self._links[holder].manifest(number, self._intake, owner, counts=self._counts.get(owner))
        try:
            await within(_ASK_AGAIN, asked)
        except (RoundGoneError, SnapshotError, TimeoutError):
            return False
        return True

    async def _fetch_snapshot(self, peer: int, number: int) -> None:
        path = self._store.received_snapshot_path(peer, number)
        manifest = await self._held_or_fetched(peer, number)
        if manifest is None:
            return
        if await asyncio.to_thread(self._store.is_refused, manifest):  # before an earlier end of this process
            self._tell(e.SnapshotRefused(peer, number))
            return
        if not await self._holds_snapshot(path, manifest):
            try:
                manifest = await self._download(manifest, path)
            except DamagedFileError:
                raise
            except SnapshotError as error:
                self.refuse(manifest, str(error))
                self._tell(e.SnapshotRefused(peer, number))
                return
        if number == self._final(peer):
            await asyncio.to_thread(self._store.make_received_durable, peer, number)
        await self._remember(manifest)
        self._tell(e.SnapshotHeld(peer, number, manifest.model_round))

    async def _download(self, manifest: Manifest, path: Path) -> Manifest:
        """Fetch a snapshot; its manifest.

        That may be another one than was held: a peer that lost its disk before anybody had fetched a round trains
        that round again, and nobody has used the first. It is reported all the same.
        """
        link = self._links[manifest.peer]
        # One that is damaged where it lies must not keep anybody for ever from leaving after the last round.
        tries = _COPY_TRIES if manifest.round == self._final(manifest.peer) else math.inf
        try:
            await link.snapshot(manifest, path, self._intake, tries=tries)
        except RoundGoneError:
            # Of round 0 nothing else may be left of a peer that lost its disk, the noise on its counts included.
            now = await link.manifest(
                manifest.round,
                self._intake,
                counts=self._counts.get(manifest.peer),
                may_draw_again=manifest.round == 0,
            )
            if now.sha256 == manifest.sha256:
                raise
            self._require_patience(now)
            self._counts[manifest.peer] = now.statistics.counts
            self._examine(now)
            self._store.save_received_manifest(now)
            await link.snapshot(now, path, self._intake, tries=tries)
            return now
        return manifest

    def _require_patience(self, manifest: Manifest) -> None:
        """Count how often a peer has another snapshot in place of the one that it has shown.

        Raises:
            SnapshotError: too often; this round goes on without it.
        """
        number, times = self._replaced.get(manifest.peer, (-1, 0))
        times = times + 1 if number == manifest.round else 1
        self._replaced[manifest.peer] = manifest.round, times
        if times > _REPLACEMENTS:
            raise SnapshotError(f"it was replaced {times} times by another one before anybody could fetch it")

    def _held_manifest(self, peer: int, number: int) -> Manifest | None:
        """What an earlier start of this process left, if it can be used."""
        try:
            document = self._store.received_manifest_path(peer, number).read_bytes()
            return self._checked(document, peer, number)
        except (FileNotFoundError, SnapshotError):
            return None

    def _checked(self, document: bytes, peer: int, number: int, sha256: str | None = None) -> Manifest:
        return self._intake.manifest(document, peer, number, sha256=sha256, counts=self._counts.get(peer))

    def refuse(self, manifest: Manifest, reason: str) -> None:
        """A snapshot must not be used: keep it aside, and say so here and to its owner."""
        kept = self._store.quarantine(manifest, reason)
        logger.warning(
            "the snapshot of round %d of peer %d is not used: %s; %s", manifest.round, manifest.peer, reason, kept
        )
        self.reasons[manifest.peer] = reason
        self._spawn(self._links[manifest.peer].refuse(manifest.round, manifest.sha256, reason))

    def _refuse_manifest(self, peer: int, number: int, error: SnapshotError) -> None:
        """A manifest must not be used: its round goes on without that peer."""
        logger.warning("round %d of peer %d is not used: %s", number, peer, error)
        self.reasons[peer] = str(error)
        self._store.note_refused(peer, number, str(error))
        self._spawn(self._links[peer].refuse(number, "", str(error)))
        self._tell(e.SnapshotRefused(peer, number, manifest=True))

    def _watched_manifest(self, peer: int, number: int) -> Manifest | None:
        """The manifest that came with the peer's state, if it is of this round and right."""
        state = self._latest_states.get(peer)
        if state is None or state.round != number:
            return None
        try:
            return self._checked(state.manifest, peer, number, sha256=state.manifest_sha256)
        except SnapshotError as error:
            logger.warning("manifest of round %d of peer %d refused: %s; asking for it again", number, peer, error)
            return None

    async def _tell_held(self, peer: int) -> None:
        """The newest snapshot of a peer that is whole here: should the peer stay away, it teaches with that."""
        last = self._store.last_round()
        for number in reversed(self._store.received_rounds(peer)):
            if number > last:  # of a round that this peer had before it lost its disk
                continue
            with suppress(OSError):  # deleted meanwhile, or not to be read; it may never be needed
                manifest = self._held_manifest(peer, number)
                refused = manifest is None or await asyncio.to_thread(self._store.is_refused, manifest)
                if (
                    manifest is not None
                    and not refused
                    and await self._holds_snapshot(self._store.received_snapshot_path(peer, number), manifest)
                ):
                    await self._remember(manifest)
                    self._tell(e.SnapshotHeld(peer, number, manifest.model_round))
                    return

    async def _holds_snapshot(self, path: Path, manifest: Manifest) -> bool:
        if not path.exists():
            return False
        try:
            await asyncio.to_thread(self._intake.snapshot, path, manifest)
        except SnapshotError:
            return False
        return True

    # --- what is remembered ----------------------------------------------------------------------------------------

    def newest_manifests(self, number: int) -> list[Manifest]:
        """Of every other peer the newest manifest that is here, up to this round; perhaps without its teachers."""
        found = []
        for peer, newest in self._newest.items():
            if newest.round <= number:
                found.append(newest)
            elif (older := self._store.newest_received(peer, number)) is not None:  # it is ahead
                found.append(older)
        return found

    def consumed(self, peer: int, number: int) -> Consumed:
        """A snapshot that taught, as manifests name it."""
        return Consumed(peer=peer, round=number, sha256=self._store.received_manifest(peer, number).sha256)

    async def _remember(self, manifest: Manifest) -> None:
        """Durably, before the snapshot is used. One write serves all that came in meanwhile."""
        if self._witness.saw(manifest.peer, manifest.round, manifest.sha256):
            self._seen_unsaved = True
        async with self._seen_saved:
            if self._seen_unsaved:
                self._seen_unsaved = False
                await to_the_end(asyncio.to_thread(self._store.save_seen, dict(self._witness.sightings)))

    def published(self, manifest: Manifest) -> None:
        """This peer's own rounds are compared with what others say of them, too."""
        self._report(self._witness.compare(self._id, manifest.round, manifest.sha256, "published here"), manifest)

    def _examine(self, manifest: Manifest) -> None:
        """Compare a manifest with all that is known from others."""
        source = "its own manifest"
        self._report(self._witness.compare(manifest.peer, manifest.round, manifest.sha256, source), manifest)
        for conflict in self._witness.compare_consumed(manifest):
            self._report(conflict, manifest)

    def _report(self, conflict: Conflict | None, manifest: Manifest) -> None:
        if conflict is None:
            return
        documents = {f"peer {manifest.peer}, round {manifest.round}": manifest.to_bytes().decode()}
        with suppress(FileNotFoundError):
            if conflict.peer == self._id:
                known = self._store.manifest(conflict.round)
            else:
                known = self._store.received_manifest(conflict.peer, conflict.round)
            documents[f"peer {known.peer}, round {known.round}, as it was here"] = known.to_bytes().decode()
        path = self._store.save_conflict(conflict, documents)
        logger.error("%s; evidence is kept in %s", conflict, path)


def _without_teachers(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"consumed": (), "missing": (), "quarantined": (), "signature": None})


def refuse_rollback(store: Store, peer: int, reply: peer_pb2.HelloReply, federation: Federation) -> None:
    """Compare what another peer has had of this one with what is here; a round beyond the last cannot have been.

    Raises:
        IncompleteError: this peer's disk has lost a round that others have, or has another one in its place.
    """
    if not reply.HasField("seen_round") or reply.seen_round > federation.rounds:
        return
    number, last = reply.seen_round, store.last_round()
    advice = "this state directory was restored from an older copy, or is not the one that this peer ran with. "
    if (why_not := federation.method.why_not_given_back) is not None:
        advice += f"Put back the newer directory, or start a new run: {why_not}, so nobody can give this peer's back"
    else:
        advice += (
            "Start the same command with --recover to fetch its last rounds back from the others (if they have "
            "finished and left, start them again after this one), or put back the newer directory"
        )
    if number > last:
        here = f"the newest here is round {last}" if last >= 0 else "there is no round here"
        raise IncompleteError(f"peer {peer} has had round {number} of this peer, and {here}: {advice}")
    try:
        own = store.manifest(number).sha256
    except FileNotFoundError:
        return
    if own != reply.seen_sha256:
        raise IncompleteError(
            f"peer {peer} has had round {number} of this peer with sha256 {printable(reply.seen_sha256[:12])}…, and "
            f"here it has {own[:12]}…: {advice}"
        )
