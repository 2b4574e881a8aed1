"""One peer at work: carries the barrier's decisions out on learner, links and store, and tells it what happened."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from crad_p2p.errors import CradError, IncompleteError, LearnerFailedError, PeersDisagreeError, error_of
from crad_p2p.federation import Federation
from crad_p2p.foreign import printable
from crad_p2p.manifest import ClassStatistics, Consumed, Manifest
from crad_p2p.memory import peak_rss_bytes
from crad_p2p.results import PeerResult, RoundRecord, Seconds, total
from crad_p2p.snapshot import SNAPSHOT_FILE, SnapshotError, layout_from_json
from peer import barrier as b
from peer._proto.crad.v1 import peer_pb2
from peer.channels import Waits, require_loopback
from peer.intake import Intake, document_digest
from peer.learner_process import LearnerProcess
from peer.link import Link
from peer.server import PeerServicer, start_server
from peer.status import Status
from peer.store import Store
from peer.waiting import to_the_end, within

logger = logging.getLogger(__name__)

#: Snapshots fetched at the same time; more would only share the same line.
_PARALLEL_FETCHES = 4
#: Starts of the learner without a finished round in between, after which another is not expected to help.
_MAX_LEARNER_STARTS = 3
#: Seconds after which an unchanged situation is worth a line in the log.
_LONG = 30.0
#: Seconds that watchers get to read the last state.
_FAREWELL = 5.0

Message = dict[str, Any]


@dataclass(frozen=True)
class Host:
    """What belongs to this host and not to the federation."""

    peer_id: int
    peers_file: Path
    listen: str
    state_dir: Path
    data_dir: Path | None
    download: bool
    device: str
    threads: int | None


@dataclass
class _RoundWork:
    """Measured between two commits, for history.jsonl. Times in seconds of the monotonic clock."""

    opened: float
    bytes_sent: int
    bytes_received: int
    training_since: float = 0.0
    transfer: float = 0.0
    consumed: tuple[Consumed, ...] = ()
    quarantined: tuple[int, ...] = ()


class Node:
    """Runs one peer to the last round."""

    def __init__(self, federation: Federation, host: Host, waits: Waits | None = None) -> None:
        self._federation = federation
        self._host = host
        self._waits = waits or Waits()
        self._id = host.peer_id
        self._entry = federation.peer(self._id)
        self._digest = federation.digest()
        self._store = Store(host.state_dir)
        self._status = Status()
        self._servicer = PeerServicer(federation, self._id, self._store, self._status)
        self._inbox: asyncio.Queue[b.Event | tuple[LearnerProcess, Message]] = asyncio.Queue()
        self._fetch_slots = asyncio.Semaphore(_PARALLEL_FETCHES)
        self._links: dict[int, Link] = {}
        self._latest_states: dict[int, peer_pb2.PeerState] = {}
        self._collected_by = dict.fromkeys((peer for peer in federation.ids if peer != self._id), -1)
        self._all_collected = asyncio.Event()
        self._intake_known = asyncio.Event()
        self._intake: Intake
        self._child: LearnerProcess | None = None  # the newest process
        self._learner: LearnerProcess | None = None  # the one that said it is ready; commands go to it alone
        self._learner_starts = 0
        self._unanswered = 0
        self._train_samples = 0
        self._peak_rss = 0

    async def run(self) -> None:
        """Take part until the last round is done and everybody has it.

        Raises:
            CradError: why this peer ended before that; another start continues after the last committed round.
        """
        require_loopback(self._federation, self._host.listen)
        self._store.open(self._federation, self._id)
        server = None
        try:
            server = await start_server(self._host.listen, self._servicer)
            self._write_pid("service", os.getpid())
            self._store.record_history()
            self._best = self._store.load_best()
            await self._take_part(self._store.last_round())
            await self._say_farewell()
        finally:
            if self._child is not None:
                await self._child.stop()
            for link in self._links.values():
                await link.close()
            self._status.close()
            await self._status.drained(1.0)  # else grpc logs a traceback for every stream that it cuts
            if server is not None:
                await server.stop(grace=1.0)
            with suppress(OSError):  # where this fails, the next start mends it
                self._store.record_history()
            self._store.close()

    async def _take_part(self, published: int) -> None:
        self._barrier = b.Barrier(
            self._collected_by,
            self._federation.rounds,
            lambda number: self._federation.teachers_of(self._id, number),
            published,
        )
        self._show_published()
        self._start_work()
        for peer in self._barrier.others:
            if published >= 0 and self._store.received_manifest_path(peer, published).exists():
                self._inbox.put_nowait(b.Announced(peer, published))
        try:
            async with asyncio.TaskGroup() as self._tasks:
                background = [self._spawn(self._stop_on_signal()), self._spawn(self._run_learner())]
                background.append(self._spawn(self._say_what_takes_long()))
                background += [self._spawn(self._watch(peer)) for peer in self._barrier.others]
                await self._pump()
                await self._linger()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            if known := group.subgroup(CradError):
                raise _first(known) from None
            if disk := group.subgroup(OSError):
                raise IncompleteError(
                    f"state directory {self._host.state_dir}: {_first(disk)}; all committed rounds are safe: mend the "
                    f"disk and start the same command again to continue"
                ) from None
            raise

    # --- the pump: events in, decisions out --------------------------------------------------------------------------

    async def _pump(self) -> None:
        """Feed the barrier until the last round has been evaluated."""
        while True:
            item = await self._inbox.get()
            event: b.Event | None
            if isinstance(item, tuple):
                process, message = item
                if message["event"] == "evaluated":
                    self._finish(message)
                    return
                event = await self._learner_says(process, message)
            else:
                event = item
            if isinstance(event, b.LearnerDown):
                self._unanswered = 0
            if event is not None:
                for decision in self._barrier.step(event):
                    await self._carry_out(decision)
            self._status.update(explanation=self._barrier.explain())

    async def _carry_out(self, decision: b.Decision) -> None:
        match decision:
            case b.FetchManifest(peer, number):
                self._spawn(self._fetch_manifest(peer, number))
            case b.FetchSnapshot(peer, number):
                self._spawn(self._fetch_snapshot(peer, number))
            case b.MakeInitialModel():
                self._command("initialise", folder=str(self._store.staging_dir(0)))
            case b.OpenRound():
                self._command("open")
            case b.Teach(peer, number):
                self._command(
                    "teach",
                    manifest=str(self._store.received_manifest_path(peer, number)),
                    snapshot=str(self._store.received_snapshot_path(peer, number)),
                )
            case b.Collected(number):
                self._choose_best(number)
                self._status.update(collected=number)
            case b.Train(number, teachers, quarantined):
                self._work.training_since = time.monotonic()
                self._work.quarantined = quarantined
                self._work.consumed = tuple(self._consume(peer, number - 1) for peer in teachers)
                self._command("train", teachers=list(teachers), folder=str(self._store.staging_dir(number)))
            case b.Finish():
                best = self._best.round if self._best.round is not None else self._barrier.published
                self._command("evaluate", snapshot=str(self._store.round_dir(best) / SNAPSHOT_FILE))

    def _command(self, do: str, **fields: Any) -> None:
        assert self._learner is not None
        if do != "open":
            self._unanswered += 1
        self._learner.send(do, **fields)

    # --- learner ---------------------------------------------------------------------------------------------------

    async def _run_learner(self) -> None:
        """Start the learner, and start it again when it ends, as long as that makes sense."""
        arguments = ["--id", str(self._id), "--peers", str(self._host.peers_file), "--device", self._host.device]
        arguments += ["--scratch", str(self._host.state_dir / "scratch")]
        if self._host.data_dir is not None:
            arguments += ["--data-dir", str(self._host.data_dir)]
        if self._host.download:
            arguments.append("--download")
        if self._host.threads is not None:
            arguments += ["--threads", str(self._host.threads)]
        while True:
            self._learner_starts += 1
            child = self._child = await LearnerProcess.start(arguments)
            self._write_pid("learner", child.pid)
            async for message in child.events():
                if message["event"] == "failed":
                    raise error_of(message["exit_code"], message["message"])
                self._inbox.put_nowait((child, message))
            status = await child.wait()
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            if self._learner_starts >= _MAX_LEARNER_STARTS:
                raise LearnerFailedError(
                    f"the learner process {how}, {_MAX_LEARNER_STARTS} times without finishing a round; the "
                    f"lines above say why, or the system's log if it ran out of memory. Rounds up to "
                    f"{self._barrier.published} are safe: start the same command again to continue"
                )
            logger.warning("the learner process %s; starting it again", how)
            self._inbox.put_nowait(b.LearnerDown())

    async def _learner_says(self, process: LearnerProcess, message: Message) -> b.Event | None:
        """Note what the learner says; the event it means to the barrier, if any."""
        kind = message["event"]
        if kind == "progress":
            phase, step, steps = message["phase"], message["step"], message["steps"]
            if phase == "teachers":  # the learner counts the samples of one teacher
                done, teachers = self._barrier.teachers_done
                step, steps = done * steps + step, teachers * steps
            self._status.update(phase=phase, step=step, steps=steps)
            return None
        if kind == "ready":
            self._learner = process
            return self._learner_ready(message)
        self._unanswered -= 1
        event: b.Event
        if kind == "restored":
            event = b.LearnerUp()
        elif kind == "taught":
            if not message["usable"]:
                logger.warning("the snapshot of peer %d is not used: %s", message["peer"], message["reason"])
            event = b.Taught(message["peer"], message["round"], message["usable"])
        else:
            event = await self._commit(message)
        if not self._unanswered:
            self._status.update(phase="wait", step=0, steps=0)
        return event

    def _learner_ready(self, message: Message) -> b.Event | None:
        layouts = {arch: layout_from_json(layout) for arch, layout in message["layouts"].items()}
        self._intake = Intake(self._federation, layouts, message["classes"])
        self._intake_known.set()
        self._train_samples = message["train_samples"]
        self._status.update(data_digest=message["data_digest"])
        for peer in self._latest_states:
            self._compare_data(peer)
        logger.info("learner on %s with %d training images", message["device"], self._train_samples)
        if self._barrier.published < 0:
            return b.LearnerUp()
        number = self._barrier.published
        self._command("restore", round=number, folder=str(self._store.round_dir(number)))
        return None

    async def _commit(self, message: Message) -> b.Published:
        """Publish the round that the learner has finished: durable first, then visible."""
        number, seconds, log = message["round"], message["seconds"], message["log"]
        if number != self._barrier.published + 1:
            raise LearnerFailedError(f"the learner made round {number} after round {self._barrier.published}")
        statistics = ClassStatistics(**{name: tuple(values) for name, values in message["statistics"].items()})
        work = self._work
        manifest = Manifest(
            run=self._digest,
            peer=self._id,
            round=number,
            arch=self._entry.arch,
            size=message["size"],
            sha256=message["sha256"],
            statistics=statistics,
            consumed=work.consumed,
        )
        record = RoundRecord(
            peer=self._id,
            round=number,
            snapshot_sha256=manifest.sha256,
            validation_accuracy=statistics.accuracy,
            global_accuracy=message["global_accuracy"],
            train_loss=log["loss"],
            target_mass=log["target_mass"],
            target_collapsed=log["target_collapsed"],
            target_top1=log["target_top1"],
            teachers=tuple(each.peer for each in work.consumed),
            quarantined_teachers=work.quarantined,
            seconds=Seconds(
                wait=max(0.0, work.training_since - work.opened - seconds["teachers"]) if number else 0.0,
                transfer=work.transfer,
                **seconds,
            ),
            bytes_sent=self._servicer.bytes_sent - work.bytes_sent,
            bytes_received=self._bytes_received() - work.bytes_received,
        )
        await to_the_end(asyncio.to_thread(self._store.commit, Path(message["folder"]), manifest, record))
        self._peak_rss = max(self._peak_rss, message["peak_rss_bytes"])
        self._learner_starts = 1
        self._store.record_history()
        kept = {number, number - 1, self._best.round}
        self._store.prune((each for each in kept if each is not None), received_from=number)
        self._start_work()
        self._show_published(message["global_accuracy"])
        logger.info(
            "round %d of %d is published, validation accuracy %s",
            number,
            self._federation.rounds,
            _percent(statistics.accuracy),
        )
        return b.Published(number)

    def _show_published(self, global_accuracy: float | None = None) -> None:
        number = self._store.last_round()
        if number < 0:
            return
        manifest = self._store.manifest(number)
        known = {} if global_accuracy is None else {"global_accuracy": global_accuracy}
        self._status.update(
            round=number,
            manifest=manifest.to_bytes(),
            manifest_sha256=document_digest(manifest.to_bytes()),
            validation_accuracy=manifest.statistics.accuracy,
            **known,
        )

    def _start_work(self) -> None:
        self._work = _RoundWork(time.monotonic(), self._servicer.bytes_sent, self._bytes_received())

    def _bytes_received(self) -> int:
        return sum(link.bytes_received for link in self._links.values())

    # --- other peers -----------------------------------------------------------------------------------------------

    async def _watch(self, peer: int) -> None:
        def on_connection(peer: int, up: bool) -> None:
            self._inbox.put_nowait(b.Connected(peer) if up else b.Disconnected(peer))

        self._links[peer] = Link(
            self._federation, self._id, peer, self._waits, on_state=self._on_state, on_connection=on_connection
        )
        await self._links[peer].watch()

    def _on_state(self, peer: int, state: peer_pb2.PeerState) -> None:
        self._latest_states[peer] = state
        self._compare_data(peer)
        self._inbox.put_nowait(b.Announced(peer, state.round))
        self._collected_by[peer] = max(self._collected_by[peer], state.collected)
        if min(self._collected_by.values()) >= self._federation.rounds:
            self._all_collected.set()

    def _compare_data(self, peer: int) -> None:
        """Both sides cut the common data by themselves; what they got must be the same.

        Raises:
            PeersDisagreeError: it is not.
        """
        here, there = self._status.state.data_digest, self._latest_states[peer].data_digest
        if here and there and here != there:
            raise PeersDisagreeError(
                f"peers {self._id} and {peer} have different data: class names, image size, labels or the split differ "
                f"(digests {here[:12]}… and {printable(there[:12])}…); give both the same data set and version of NumPy"
            )

    async def _fetch_manifest(self, peer: int, number: int) -> None:
        await self._intake_known.wait()
        path = self._store.received_manifest_path(peer, number)
        if not self._holds_manifest(path, peer, number):
            manifest = self._watched_manifest(peer, number)
            if manifest is None:
                manifest = await self._links[peer].manifest(number, self._intake)
            self._store.save_received_manifest(manifest)
        self._inbox.put_nowait(b.ManifestHeld(peer, number))

    async def _fetch_snapshot(self, peer: int, number: int) -> None:
        path = self._store.received_snapshot_path(peer, number)
        manifest = self._received_manifest(peer, number)
        if not await self._holds_snapshot(path, manifest):
            async with self._fetch_slots:
                start = time.monotonic()
                try:
                    await self._links[peer].snapshot(manifest, path, self._intake)
                except SnapshotError as error:
                    logger.warning("the snapshot of peer %d is not used: %s", peer, error)
                    self._inbox.put_nowait(b.SnapshotRefused(peer, number))
                    return
                self._work.transfer += time.monotonic() - start
        self._inbox.put_nowait(b.SnapshotHeld(peer, number))

    def _watched_manifest(self, peer: int, number: int) -> Manifest | None:
        """The manifest that came with the peer's state, if it is of this round and right."""
        state = self._latest_states.get(peer)
        if state is None or state.round != number:
            return None
        try:
            return self._intake.manifest(state.manifest, peer, number, sha256=state.manifest_sha256)
        except SnapshotError as error:
            logger.warning("manifest of round %d of peer %d refused: %s; asking for it again", number, peer, error)
            return None

    def _holds_manifest(self, path: Path, peer: int, number: int) -> bool:
        """Whether an earlier start of this process left a manifest that can be used."""
        try:
            self._intake.manifest(path.read_bytes(), peer, number)
        except (FileNotFoundError, SnapshotError):
            return False
        return True

    async def _holds_snapshot(self, path: Path, manifest: Manifest) -> bool:
        if not path.exists():
            return False
        try:
            await asyncio.to_thread(self._intake.snapshot, path, manifest)
        except SnapshotError:
            return False
        return True

    def _received_manifest(self, peer: int, number: int) -> Manifest:
        return Manifest.from_bytes(self._store.received_manifest_path(peer, number).read_bytes())

    def _consume(self, peer: int, number: int) -> Consumed:
        return Consumed(peer=peer, round=number, sha256=self._received_manifest(peer, number).sha256)

    def _choose_best(self, number: int) -> None:
        manifests = [self._received_manifest(peer, number) for peer in self._barrier.others]
        if self._best.offer([self._store.manifest(number), *manifests]):
            self._store.save_best(self._best)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _finish(self, evaluated: Message) -> None:
        """Write this peer's result."""
        last = self._barrier.published
        best = self._best.round if self._best.round is not None else last
        statistics = self._store.manifest(best).statistics
        result = PeerResult(
            id=self._id,
            arch=self._entry.arch,
            train_samples=self._train_samples,
            rounds_completed=last,
            snapshot_sha256=self._store.manifest(last).sha256,
            global_accuracy=evaluated["global_accuracy"],
            local_accuracy=evaluated["local_accuracy"],
            global_accuracy_per_class=tuple(evaluated["global_accuracy_per_class"]),
            counts=statistics.counts,
            hits=statistics.hits,
            peak_rss_bytes=max(self._peak_rss, evaluated["peak_rss_bytes"]),
        )
        self._store.save_result(total(self._store.history(), result), self._best.round)
        logger.info(
            "all %d rounds are done; best round %s, global accuracy %s, local accuracy %s",
            last,
            self._best.round,
            _percent(result.global_accuracy),
            _percent(result.local_accuracy),
        )
        logger.info("peak memory: learner %d MB, service %d MB", result.peak_rss_bytes >> 20, peak_rss_bytes() >> 20)

    async def _linger(self) -> None:
        """Serve on until every other peer has what it needs."""
        self._status.update(phase="linger", step=0, steps=0)
        if not self._collected_by:
            return
        logger.info("serving on until every other peer has what it needs, %g s at most", self._waits.linger)
        try:
            await within(self._waits.linger, self._all_collected.wait())
        except TimeoutError:
            late = sorted(peer for peer, number in self._collected_by.items() if number < self._federation.rounds)
            logger.warning(
                "leaving after %g s, though peers %s have not said that they have everything", self._waits.linger, late
            )

    async def _say_farewell(self) -> None:
        """Let those who watch read that this peer leaves, and has collected everything."""
        self._status.update(phase="done", leaving=True)
        if not await self._status.drained(_FAREWELL):
            logger.info("someone still watches; leaving all the same")

    async def _say_what_takes_long(self) -> NoReturn:
        """Log what this peer waits for, when it has not changed for a while."""
        said = before = ""
        while True:
            await asyncio.sleep(_LONG)
            explanation = self._status.state.explanation
            if explanation == before != said:
                logger.info("still so after %g s: %s", _LONG, explanation)
                said = explanation
            before = explanation

    async def _stop_on_signal(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[str] = loop.create_future()

        def note(name: str) -> None:
            if not told.done():
                told.set_result(name)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, note, number.name)
        name = await told
        done, rounds = self._barrier.published, self._federation.rounds
        if done == rounds:
            raise IncompleteError(
                f"stopped by {name}; all {rounds} rounds are done, but other peers may still need this one: start the "
                f"same command again to serve them"
            )
        where = f"after round {done} of {rounds}" if done > 0 else "before the end of its first round"
        raise IncompleteError(f"stopped by {name} {where}; start the same command again to continue")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    def _write_pid(self, name: str, pid: int) -> None:
        (self._host.state_dir / f"{name}.pid").write_text(f"{pid}\n")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _percent(accuracy: float | None) -> str:
    return "unknown" if accuracy is None else f"{100 * accuracy:.1f} %"
