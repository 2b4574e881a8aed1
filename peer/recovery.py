"""``crad-peer --recover``: fetch this peer's own last rounds back from those who have had them.

What others have of a peer is its snapshots and manifests, byte for byte; the optimiser's momentum was never sent, and
starts anew. By a method whose peers do not publish their models nobody has them: if the last round is not here as the
others have had it, the peer cannot go on, and is told so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from crad_p2p.errors import IncompleteError
from crad_p2p.federation import Federation
from crad_p2p.manifest import Manifest
from crad_p2p.results import RoundRecord
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE, SnapshotError
from peer._proto.crad.v1 import peer_pb2
from peer.channels import Waits
from peer.chunks import LEAST_BYTES
from peer.intake import Intake
from peer.link import Link, RoundGoneError, greeting_slots
from peer.store import Store
from peer.tls import Tls
from peer.waiting import within
from peer.witness import Sighting
from peer.words import name_peers

logger = logging.getLogger(__name__)


class _SlowError(Exception):
    """Another holder may be faster."""


AreEnough = Callable[[Collection[peer_pb2.HelloReply]], bool]

#: Seconds after which it is worth a line who has not answered.
_SAY_AFTER = 5.0
#: Times that a snapshot may come damaged before the next holder is asked.
_TRIES = 3
#: A safetensors file without any tensor: no momentum.
_EMPTY_CHECKPOINT = (2).to_bytes(8, "little") + b"{}"


async def recover(
    federation: Federation, own_id: int, store: Store, intake: Intake, waits: Waits, tls: Tls | None = None
) -> None:
    """Bring the store up to what the others have had of this peer.

    Every other peer is asked, for as long as the start wait; with policy ``quorum`` answers of enough of them will do,
    if they remember anything: one that has lost its disk, too, has nothing to say.

    Raises:
        IncompleteError: too few answer, they contradict one another, or nobody keeps the bytes any more, or ever had
            the model.
    """
    others, greetings = [peer for peer in federation.ids if peer != own_id], greeting_slots(len(federation.peers))
    links = {peer: Link(federation, own_id, peer, waits, tls=tls, greetings=greetings) for peer in others}
    try:
        replies = await _ask_all(links, partial(_are_enough, federation, own_id), waits)
        _require_enough(federation, own_id, replies, waits.start)
        newest = _newest(own_id, replies)
        if (why_not := federation.method.why_not_given_back) is not None:
            _require_model(why_not, store, newest)
        damaged: list[int] = []
        while bad := [number for number in store.kept_rounds() if store.damage(number)]:  # of the last more is wanted
            damaged += bad
            for number in bad:
                store.set_aside(number)
        if newest is None or _is_here(store, newest):
            last = store.last_round()
        else:
            last = newest.round
            has_other_bytes = store.round_dir(last).exists()
            holders = [links[peer] for peer, reply in replies.items() if reply.seen_sha256 == newest.sha256]
            if not await _fetch(holders, own_id, last, newest.sha256, store, intake, waits):
                had = name_peers(link.peer for link in holders)
                raise IncompleteError(
                    f"round {last} of this peer has been with {had}, and nobody keeps it any more: put back a copy of "
                    f"the state directory"
                )
            damaged.append(last)
            if has_other_bytes:  # then so may the round before have: this peer has run twice
                store.set_aside(_before(federation, own_id, last))
        # Who is one round behind may still need the one before.
        before = _before(federation, own_id, last)
        if last > 0 and why_not is None and not store.round_dir(before).exists():
            asked = [links[peer] for peer in replies]
            await _fetch(asked, own_id, before, None, store, intake, waits)
        store.rewind_history()  # also after a start that was killed before it came to this
        _say_result(store, links.values(), has_lost=bool(damaged))
    finally:
        for link in links.values():
            await link.close()


def _require_model(why_not: str, store: Store, newest: Sighting | None) -> None:
    """See that the last round is here and whole, where nobody can give its model back; ``why_not`` says why."""
    last = store.last_round()
    if newest is not None and not _is_here(store, newest):
        what = f"the model of round {newest.round}, of which others have what was published, is not here"
    elif last >= 0 and (reason := store.damage(last)):
        what = f"the model of round {last} is damaged here ({reason})"
    else:
        return
    raise IncompleteError(
        f"{what}, and {why_not}, so nobody can give it back: put back a copy of the state directory as it was after "
        f"that round, or start a new run"
    )


def _before(federation: Federation, own_id: int, number: int) -> int:
    """The round that this peer published before this one."""
    return federation.version(own_id, number - 1) if number > 0 else -1


def _say_result(store: Store, links: Iterable[Link], *, has_lost: bool) -> None:
    last = store.last_round()
    if has_lost:
        logger.info("going on from round %d", last)
    if claims := [link for link in links if link.doubted > last]:
        # To refuse to start would let any member keep this peer out with a claim that nobody can check.
        logger.warning(
            "%s had later rounds of this peer than is here, and cannot prove it: if this peer's certificate was from "
            "another CA then, stop it, put that CA into its ca.pem too, and start it with --recover again; else those "
            "rounds are made a second time, and reported as such",
            " and ".join(f"peer {link.peer} (round {link.doubted})" for link in claims) + " may have",
        )
    elif not has_lost:
        logger.info("nothing was lost: no other peer has had more of this one than is here")


def _enough(federation: Federation) -> int:
    """Peers, this one included, without whose word nothing is recovered."""
    size = len(federation.peers)
    return federation.barrier.quorum(size)[0] if federation.barrier.policy == "quorum" else size


async def _ask_all(links: Mapping[int, Link], are_enough: AreEnough, waits: Waits) -> dict[int, peer_pb2.HelloReply]:
    """Answers of all, or of those who answer in time; once they are enough, the rest get the time of one request."""
    asked = {peer: asyncio.ensure_future(link.hello()) for peer, link in links.items()}
    clock = asyncio.get_running_loop().time
    start = clock()
    until = start + waits.start
    said: tuple[int, ...] = ()
    try:
        has_enough = False
        while (open_still := [task for task in asked.values() if not task.done()]) and (left := until - clock()) > 0:
            await asyncio.wait(open_still, timeout=min(left, _SAY_AFTER), return_when=asyncio.FIRST_COMPLETED)
            silent = tuple(peer for peer, task in asked.items() if not task.done())
            if silent and silent != said and clock() - start > _SAY_AFTER:
                said = silent
                logger.info(
                    "waiting for the answer of %s, for %.0f s more at most", name_peers(silent), until - clock()
                )
            answers = [task.result() for task in asked.values() if task.done()]
            if not has_enough and are_enough(answers):
                has_enough, until = True, min(until, clock() + waits.connect)
        return {peer: task.result() for peer, task in asked.items() if task.done()}
    finally:
        for task in asked.values():
            task.cancel()


def _are_enough(federation: Federation, own_id: int, replies: Collection[peer_pb2.HelloReply]) -> bool:
    """Whether these answers will do: all, or enough of those who have had a snapshot of anybody."""
    # Else no snapshot ever leaves its peer.
    last = federation.version(own_id, federation.rounds)
    is_remembered = last > 0 and federation.teachers_of(own_id, last) != ()
    witnesses = sum(reply.remembers or not is_remembered for reply in replies)
    return 1 + len(replies) == len(federation.peers) or 1 + witnesses >= _enough(federation)


def _require_enough(
    federation: Federation, own_id: int, replies: Mapping[int, peer_pb2.HelloReply], seconds: float
) -> None:
    if not _are_enough(federation, own_id, replies.values()):
        size, enough = len(federation.peers), _enough(federation)
        who = f"enough are up whose disks are whole ({enough} of {size} peers, this one included)"
        who = who if enough < size else "all others are up"
        silent = [peer for peer in federation.ids if peer != own_id and peer not in replies]
        raise IncompleteError(
            f"{name_peers(silent)} did not answer within {seconds:g} s, and may have had a later round of this peer "
            f"than is here: start again with --recover when {who}"
        )


def _newest(own_id: int, replies: Mapping[int, peer_pb2.HelloReply]) -> Sighting | None:
    seen = Counter(Sighting(r.seen_round, r.seen_sha256) for r in replies.values() if r.HasField("seen_round"))
    if not seen:
        return None
    number = max(each.round for each in seen)
    there = [each for each in seen if each.round == number]
    if len(there) > 1:
        raise IncompleteError(
            f"the other peers have had {len(there)} different snapshots of round {number} of peer {own_id} "
            f"(sha256 {', '.join(each.sha256[:12] + '…' for each in there)}): it has run twice. Put back the newest "
            f"state directory, or start the federation anew"
        )
    return there[0]


def _is_here(store: Store, newest: Sighting) -> bool:
    if store.last_round() < newest.round:
        return False
    try:
        return store.manifest(newest.round).sha256 == newest.sha256
    except FileNotFoundError:
        return True  # long past


async def _fetch(
    holders: list[Link], own_id: int, number: int, sha256: str | None, store: Store, intake: Intake, waits: Waits
) -> bool:
    """Fetch one round from the first who keeps it, and commit it; whether anybody does.

    One whose bytes come so slowly that others may be faster is asked again after all others.
    """
    slow: list[tuple[Link, Manifest]] = []
    for link in holders:
        try:
            manifest = await within(waits.connect, link.manifest(number, intake, own_id))
            if sha256 is not None and manifest.sha256 != sha256:
                continue
            await _take(link, manifest, store, intake, waits, least=LEAST_BYTES)
        except _SlowError as error:
            logger.info("round %d: %s", number, error)
            slow.append((link, manifest))
        except (RoundGoneError, SnapshotError, TimeoutError) as error:
            logger.info("round %d: %s", number, str(error) or f"peer {link.peer} does not answer")
        else:
            return True
    for link, manifest in slow:
        try:
            await _take(link, manifest, store, intake, waits, least=1)
        except (RoundGoneError, SnapshotError, _SlowError) as error:
            logger.info("round %d: %s", number, error)
        else:
            return True
    return False


async def _take(link: Link, manifest: Manifest, store: Store, intake: Intake, waits: Waits, *, least: int) -> None:
    number = manifest.round
    staging: Path = store.staging_dir(number)
    transfer = link.snapshot(manifest, staging / SNAPSHOT_FILE, intake, tries=_TRIES)
    await _while_it_moves(link, transfer, waits.no_progress, least)
    (staging / CHECKPOINT_FILE).write_bytes(_EMPTY_CHECKPOINT)
    if store.round_dir(number).exists():  # damaged, or not what the others have had; nor is what came after it
        for each in range(number, store.last_round() + 1):
            store.set_aside(each)
    record = RoundRecord(
        peer=manifest.peer,
        round=number,
        snapshot_sha256=manifest.sha256,
        validation_accuracy=manifest.statistics.accuracy,
        teachers=tuple(each.peer for each in manifest.consumed),
        missing_teachers=manifest.missing,
        stale_teachers=tuple(each.peer for each in manifest.consumed if each.round < intake.due(each.peer, number)),
        quarantined_teachers=manifest.quarantined,
    )
    store.commit(staging, manifest, record)
    logger.info("round %d of this peer is back, from peer %d", number, link.peer)


async def _while_it_moves(link: Link, transfer: Coroutine[Any, Any, None], seconds: float, least: int) -> None:
    """Wait for a transfer as long as bytes come: a link goes on for ever, and another peer may have the round, too.

    Raises:
        _SlowError: fewer than ``least`` bytes came in so many seconds.
    """
    task = asyncio.ensure_future(transfer)
    try:
        received = -least
        while not task.done() and link.bytes_received >= received + least:
            received = link.bytes_received
            await asyncio.wait([task], timeout=seconds)
        if not task.done():
            came = link.bytes_received - received
            raise _SlowError(f"peer {link.peer} has sent {came} bytes in {seconds:g} s, and another may be faster")
        task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])
