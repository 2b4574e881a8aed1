"""One peer at work: carries the barrier's decisions out on learner, links and store, and tells it what happened."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from crad_p2p.errors import (
    CradError,
    DataError,
    IncompleteError,
    LearnerFailedError,
    PeersDisagreeError,
    error_of,
)
from crad_p2p.failpoints import fail_point
from crad_p2p.federation import Federation
from crad_p2p.manifest import ClassStatistics, Consumed, Manifest
from crad_p2p.memory import peak_rss_bytes
from crad_p2p.privacy import create_key, describe_noise, load_key
from crad_p2p.results import BestRound, PeerResult, RoundRecord, Seconds, total
from crad_p2p.snapshot import SNAPSHOT_FILE, layout_from_json
from peer import events as e
from peer import heap
from peer._proto.crad.v1 import peer_pb2
from peer.barrier import Barrier, Quorum
from peer.channels import Waits, require_loopback
from peer.ending import Ending, let_find_out
from peer.exchange import Exchange
from peer.findings import Level
from peer.hello import data_as_json
from peer.host import Host
from peer.intake import Intake
from peer.learner_process import LearnerProcess, how_it_ended
from peer.proxies import check_proxies, elsewhere
from peer.publishing import Publisher
from peer.recorder import Recorder
from peer.recovery import recover
from peer.refusals import Refusals
from peer.room import check_room
from peer.server import PeerServicer, Server
from peer.signals import Signals
from peer.standstill import LONG, Standstill
from peer.status import Status
from peer.store import Store
from peer.tls import Tls
from peer.waiting import to_the_end, within
from peer.witness import Witness
from peer.words import name_peers

logger = logging.getLogger(__name__)

#: Starts of the learner without a finished round in between, after which another is not expected to help.
_MAX_LEARNER_STARTS = 5
#: Seconds between two writings of what was refused.
_SAVE = 5.0

Message = dict[str, Any]


@dataclass
class _RoundWork:
    """Measured between two commits, for history.jsonl. Times in seconds of the monotonic clock."""

    opened: float
    bytes_sent: int
    bytes_received: int
    transfer: float
    training_since: float = 0.0
    train: e.Train | None = None  # None for the initial model
    consumed: tuple[Consumed, ...] = ()


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
        self._status = Status(len(federation.peers))
        self._inbox: asyncio.Queue[e.Event | tuple[LearnerProcess, Message]] = asyncio.Queue()
        self._child: LearnerProcess | None = None  # the newest process
        self._learner: LearnerProcess | None = None  # the one that said it is ready; commands go to it alone
        self._learner_starts = 0
        self._has_count_key = False
        self._has_new_count_key = False  # drawn at this start
        self._has_looked = False  # whether there is room for the run
        self._unanswered = 0
        self._refusals = Refusals(host.state_dir / "refused.txt")
        self._damage: asyncio.Queue[tuple[int, str]] = asyncio.Queue()  # seen when a snapshot was sent
        self._train_samples = 0
        self._teacher_precision: str | None = None
        self._peak_rss = 0
        # Missing and stale teachers of the last round:
        self._lacking: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._ending: Ending | None = None  # once the last round is evaluated
        self._call_back: Callable[[int], None] = lambda _: None  # once there are links

    async def run(self) -> None:
        """Take part until the last round is done and everybody has it.

        Raises:
            ReservationsError: all rounds are done, but some without a peer, or with evidence against one.
            CradError: why this peer ended before that; another start continues after the last committed round.
        """
        tls = self._tls = self._load_tls()
        if tls is None:
            require_loopback(self._federation, self._host.listen)
            logger.warning(
                "--insecure: this peer speaks plain text, and believes whoever says that it is another peer; peers "
                "with TLS do not talk to it"
            )
        self._signals = Signals(on_second=self._status.close)  # whoever watches is not waited for then
        proxies = check_proxies(os.environ, elsewhere(self._federation, self._id))
        if proxies.level is not Level.OK:
            logger.warning("%s", proxies.sentence)
        try:
            self._store.open(self._federation, self._id)
            await self._run_opened()
        except OSError as error:
            raise self._disk_failed(error) from None

    def _load_tls(self) -> Tls | None:
        folder = self._host.tls_dir
        return None if folder is None else Tls(folder, self._federation.federation, self._id)

    async def _run_opened(self) -> None:
        server = exchange = None
        try:
            witness = Witness(self._store.load_seen())
            self._publisher = Publisher(self._store, self._status, self._tls)
            self._servicer = PeerServicer(
                self._federation,
                self._id,
                self._store,
                self._status,
                witness,
                self._tls,
                on_damage=lambda *what: self._damage.put_nowait(what),
                on_refusal=self._hear_refusal,
                on_follow=lambda peer: self._call_back(peer),  # as it is then
            )
            server = self._server = Server(self._host.listen, self._servicer, self._refusals)
            self._write_pid("service", os.getpid())
            if self._host.recover:
                self._status.update(phase="recover")
                await server.start()  # another one that recovers needs this one's answer, and perhaps its own rounds
                await self._signals.unless_told(self._recover())
            self._store.check_rounds()
            self._prepare_count_key()
            self._store.record_history()
            self._store.history()  # one that is damaged is told now, and not after the last round
            self._best = self._load_best()
            exchange = self._exchange = Exchange(
                self._federation,
                self._id,
                self._store,
                self._status,
                witness,
                self._waits,
                tls=self._tls,
                tell=self._inbox.put_nowait,
                spawn=self._spawn,
                may_lose=self._federation.barrier.policy == "quorum",
            )
            self._call_back = exchange.call_back
            others = exchange.collected_by.keys()
            self._had_served_all = bool(others) and exchange.served >= others
            self._start_work()
            last = self._store.last_round()
            if last >= 0 and last == self._version(self._federation.rounds):  # else rounds have been lost since
                last = max(last, self._store.passed())
            if last >= 0:
                logger.info("continues after round %d of %d", last, self._federation.rounds)
            self._publisher.sign_again()
            for number in self._store.kept_rounds():
                exchange.published(self._store.manifest(number))
            # Before anybody can ask: a peer that says less than it has counts as rolled back.
            self._publisher.show(self._store.busy_seconds())
            if not self._host.recover:
                await server.start()
            try:
                ending = await self._take_part(last)
            except PeersDisagreeError as disagreement:
                await let_find_out(self._status, self._servicer.greeted, disagreement.peer)
                raise
            with suppress(IncompleteError):  # told to stop: it has all, and only does without the last courtesy
                await self._signals.unless_told(ending.say_farewell())
            ending.say_reservations()
        finally:
            # Side by side: each takes seconds if the learner does not react, or somebody does not read.
            stopping = [self._stop_exchanging(server, exchange)]
            if self._child is not None:
                stopping.append(self._child.stop())
            ended = await asyncio.gather(*stopping, return_exceptions=True)
            with suppress(OSError, CradError, ValueError):  # where this fails, the next start mends or tells it
                self._store.record_history()
                self._refusals.save()
            if self._has_new_count_key and self._store.last_round() < 0:  # nothing was published with it
                with suppress(OSError):
                    self._store.count_key.unlink(missing_ok=True)
            self._store.close()
            for error in ended:
                if error is not None:
                    raise error

    async def _stop_exchanging(self, server: Server | None, exchange: Exchange | None) -> None:
        if exchange is not None:
            await exchange.close()
        self._status.close()
        await self._status.drained(1.0)  # else grpc logs a traceback for every stream that it cuts
        if server is not None:
            await server.stop(grace=1.0)

    async def _take_part(self, published: int) -> Ending:
        """From this round to the end, which is returned."""
        federation = self._federation
        quorum = federation.barrier.policy == "quorum"
        self._barrier = Barrier(
            self._exchange.collected_by,
            federation.rounds,
            lambda number: federation.teachers_of(self._id, number),
            published,
            quorum=Quorum(*federation.barrier.quorum(len(federation.peers))) if quorum else None,
            part=federation.part_of(self._id),
            now=time.monotonic(),
            start_wait=self._waits.start,
        )
        self._recorder = Recorder(self._host.state_dir, self._barrier)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                watches = (
                    self._stop_on_signal(),
                    self._stop_on_damage(),
                    self._server.watch(),
                    self._say_what_takes_long(),
                )
                background = [self._spawn(each) for each in watches] + self._exchange.watch()
                background += [self._spawn(self._save_refusals()), self._spawn(heap.keep_small(self._bytes_moved))]
                if self._tls is not None:
                    background.append(self._spawn(self._tls.watch(on_change=self._renew)))
                self._learner_task = self._spawn(self._run_learner())
                ending = await self._pump()
                await self._exchange.forget_before(federation.rounds + 1)  # nothing is needed any more
                for task in background:
                    task.cancel()
            return ending
        except BaseExceptionGroup as group:
            if known := group.subgroup(CradError):
                raise _first(known) from None
            if disk := group.subgroup(OSError):
                raise self._disk_failed(_first(disk)) from None
            raise
        finally:
            with suppress(OSError):  # on a full disk it fails again, and must not hide what ended this peer
                self._recorder.close()

    def _disk_failed(self, error: BaseException) -> IncompleteError:
        known = error if isinstance(error, OSError) else OSError()
        where, what = known.filename or self._host.state_dir, known.strerror or error
        return IncompleteError(
            f"{where}: {what}; all committed rounds in state directory {self._host.state_dir} are safe: mend this and "
            f"start the same command again to continue"
        )

    async def _recover(self) -> None:
        """Fetch lost rounds back, before this peer shows itself to the others."""
        logger.info("asking all other peers, for %g s at most, what they have had of this one", self._waits.start)
        child = self._child = await LearnerProcess.start(self._learner_arguments())
        async for message in child.events():
            if message["event"] == "failed":
                raise error_of(message["exit_code"], message["message"])
            if message["event"] == "ready":
                break
        else:
            raise LearnerFailedError(
                f"the learner process {how_it_ended(await child.wait())} while it started; the lines above say why, "
                f"or the system's log if it ran out of memory. Start the same command again"
            )
        await child.stop()
        # Whether own images are those of the rounds that come back is said when these are here.
        intake = self._intake_of({**message, "validation_counts": None} if message.get("own") else message)
        try:
            await recover(self._federation, self._id, self._store, intake, self._waits, self._tls)
        except OSError as error:
            raise self._disk_failed(error) from None

    # --- the pump: events in, decisions out --------------------------------------------------------------------------

    async def _pump(self) -> Ending:
        """Feed the barrier until the last round has been evaluated, and everybody has what it needs."""
        while self._ending is None or not self._ending.may_leave(self._bytes_moved()):
            item = await self._next()
            event: e.Event | None
            if isinstance(item, tuple):
                process, message = item
                event = await self._learner_says(process, message)
            else:
                event = item
            if isinstance(event, e.LearnerDown):
                self._unanswered = 0
            if event is not None:
                now = time.monotonic()
                decisions = self._barrier.step(e.Tick(now)) + self._barrier.step(event)
                self._recorder.record(now, event, decisions)
                for decision in decisions:
                    await self._carry_out(decision)
            self._status.update(explanation=self._barrier.explain())
        return self._ending

    async def _next(self) -> e.Event | tuple[LearnerProcess, Message]:
        """What comes next; the time, where that alone may change something."""
        now, wake_at = time.monotonic(), self._barrier.wake_at
        due = math.inf if wake_at is None else wake_at
        if self._ending is not None:
            due = min(due, self._ending.wake_at(now))
        if due == math.inf:
            return await self._inbox.get()
        try:
            return await within(max(0.0, due - now), self._inbox.get())
        except TimeoutError:
            return e.Tick(time.monotonic())

    async def _carry_out(self, decision: e.Decision) -> None:
        match decision:
            case e.FetchManifest() | e.FetchSnapshot():
                self._exchange.fetch(decision)
            case e.MakeInitialModel():
                self._command("initialise", folder=str(self._store.staging_dir(0)))
            case e.OpenRound(number):
                self._command("open", round=number)
            case e.Teach(peer, number):
                self._command(
                    "teach",
                    manifest=str(self._store.received_manifest_path(peer, number)),
                    snapshot=str(self._store.received_snapshot_path(peer, number)),
                )
            case e.Collected(number):
                fail_point("collected", number)
                self._choose_best(number)
                fail_point("best-durable", number)
                if number == self._federation.rounds > self._store.last_round():
                    self._store.save_passed(number)
                # Nobody acts on it before the last round; with partial participation it would be most of the traffic.
                if number < self._federation.rounds and self._federation.participation is None:
                    self._status.update(collected=number)
            case e.Release():
                self._status.update(collected=self._federation.rounds)
            case e.Train():
                self._train(decision)
            case e.Rejoin(number):
                await self._rejoin(number)
            case e.GiveUp(missing):
                raise IncompleteError(
                    f"{name_peers(missing)} {'has' if len(missing) == 1 else 'have'} not been reached within "
                    f"{self._waits.start:g} s of the start; see whether {name_peers(missing)} "
                    f"{'runs' if len(missing) == 1 else 'run'} at the address in the file"
                    + ("" if self._tls is None else ", with a certificate of the CA that is trusted here")
                    + " ('crad-mesh check' tells more), and start the same command again (--start-wait gives them "
                    "longer)" + "".join(f"; {trouble}" for trouble in self._exchange.troubles())
                )
            case e.Finish():
                self._command("evaluate", snapshot=str(self._store.round_dir(self._best_own()) / SNAPSHOT_FILE))

    def _train(self, decision: e.Train) -> None:
        work, last = self._work, self._store.last_round()
        newest = {peer: self._federation.version(peer, decision.round - 1) for peer in decision.teachers}
        rounds = {**newest, **dict(decision.stale)}
        work.training_since = time.monotonic()
        work.train = decision
        work.consumed = tuple(self._exchange.consumed(peer, number) for peer, number in rounds.items())
        lacking = (decision.missing, tuple(peer for peer, _ in decision.stale))
        if lacking != self._lacking:  # once, and again when it changes; every round has it in its history
            self._lacking = lacking
            words = [f"without {name_peers(decision.missing)}"] if decision.missing else []
            words += [f"with an older model of {name_peers(lacking[1])}"] if decision.stale else []
            if words:
                logger.warning("round %d is trained %s", decision.round, " and ".join(words))
            else:
                logger.info("round %d is trained with the newest models of all others again", decision.round)
        self._command(
            "train",
            teachers=list(decision.teachers),
            last=str(self._store.round_dir(last)),
            folder=str(self._store.staging_dir(decision.round)),
        )
        fail_point("train-sent", decision.round)

    async def _rejoin(self, number: int) -> None:
        """Publish the last model again, as the round to which the mesh has gone on without this peer."""
        last = self._barrier.published
        before = self._store.manifest(last)
        manifest = before.model_copy(
            update={"round": number, "consumed": (), "missing": (), "quarantined": ()}  # model_round stays
        )
        record = RoundRecord(
            peer=self._id,
            round=number,
            snapshot_sha256=manifest.sha256,
            validation_accuracy=manifest.statistics.accuracy,
            skipped_rounds=tuple(range(last + 1, number)),
        )
        logger.warning(
            "the mesh is at round %d and went on without this peer, which was at round %d: going on from there with "
            "the model of round %d",
            number,
            last,
            manifest.model_round,
        )
        await self._publish(self._store.copy_round(last, number), manifest, record, busy=0.0)
        await self._exchange.forget_before(number)  # they would keep the line busy for rounds that are over
        # The learner may still be busy with the round before and its files; they are deleted with the next round.
        if self._learner is not None:
            self._restore_learner(number)
        self._inbox.put_nowait(e.Published(number))

    def _command(self, do: str, **fields: Any) -> None:
        assert self._learner is not None
        if do != "open":
            self._unanswered += 1
        self._learner.send(do, **fields)

    # --- learner ---------------------------------------------------------------------------------------------------

    def _learner_arguments(self) -> list[str]:
        count_key = self._store.count_key if self._has_count_key else None
        return self._host.learner_arguments(self._store.scratch_dir(), count_key)

    def _prepare_count_key(self) -> None:
        """Before the first round, draw the secret of the noise on the class counts, if there is to be noise.

        A peer that has rounds and no secret (any more) goes on with the counts that it has published.

        Raises:
            ConfigurationError: the secret cannot be used, or others may read it.
        """
        epsilon = self._federation.privacy.count_epsilon
        if epsilon is None:
            return
        logger.info("%s", describe_noise(epsilon, is_own=self._federation.data.is_own))
        path = self._store.count_key
        if not path.exists() and self._store.last_round() < 0:
            create_key(path)
            self._has_new_count_key = True
        self._has_count_key = path.exists()
        if self._has_count_key:
            load_key(path)  # what is wrong with it is told now
        else:
            logger.warning("%s is not there; the class counts stay those that this peer has published", path)

    def _restore_learner(self, number: int) -> None:
        counts = self._store.manifest(number).statistics.counts
        self._command("restore", round=number, folder=str(self._store.round_dir(number)), counts=list(counts))

    async def _run_learner(self) -> None:
        """Start the learner, and start it again when it ends, as long as that makes sense."""
        while True:
            self._learner_starts += 1
            child = self._child = await LearnerProcess.start(self._learner_arguments())
            self._write_pid("learner", child.pid)
            async for message in child.events():
                if message["event"] == "failed":
                    raise error_of(message["exit_code"], message["message"])
                self._inbox.put_nowait((child, message))
            how = how_it_ended(await child.wait())
            if self._learner_starts >= _MAX_LEARNER_STARTS:
                raise LearnerFailedError(
                    f"the learner process {how}, {_MAX_LEARNER_STARTS} times without finishing a round; the "
                    f"lines above say why, or the system's log if it ran out of memory. Rounds up to "
                    f"{self._barrier.published} are safe: start the same command again to continue"
                )
            logger.warning("the learner process %s; starting it again", how)
            self._inbox.put_nowait(e.LearnerDown())

    async def _learner_says(self, process: LearnerProcess, message: Message) -> e.Event | None:
        """Note what the learner says; the event it means to the barrier, if any."""
        kind = message["event"]
        if kind == "progress":
            phase, step, steps = message["phase"], message["step"], message["steps"]
            if phase == "teachers":  # the learner counts the samples of one teacher
                done, teachers = self._barrier.teachers_done
                step, steps = done * steps + step, teachers * steps
            self._status.update(phase=phase, step=step, steps=steps)
            return None
        if kind == "note":
            logger.info("%s", message["message"])
            return None
        if kind == "warning":
            logger.warning("%s", message["message"])
            return None
        if kind == "ready":
            self._learner = process
            return self._learner_ready(message)
        self._unanswered -= 1
        event: e.Event | None
        if kind == "evaluated":
            await self._finish(message)
            return None
        if kind == "restored":  # of the round of now, unless this peer rejoined the mesh meanwhile
            event = e.LearnerUp() if message["round"] == self._store.last_round() else None
        elif kind == "taught":
            if not message["usable"]:
                manifest = self._store.received_manifest(message["peer"], message["round"])
                self._exchange.refuse(manifest, message["reason"])
            event = e.Taught(message["peer"], message["round"], message["usable"])
        else:
            event = await self._commit(message)
        if not self._unanswered:
            self._status.update(phase="wait", step=0, steps=0)
        return event

    def _learner_ready(self, message: Message) -> e.Event | None:
        data = peer_pb2.Data(
            class_names=message["class_names"],
            image_shape=message["image_shape"],
            partition_digest=message["partition_digest"],
            test_digest=message.get("test_digest", ""),
        )
        own = message.get("own")
        intake = self._intake_of(message)
        same = self._store.require_same_data(data_as_json(data) | ({"own_images": own["digest"]} if own else {}))
        if own and not same:
            self._require_published_counts(intake)
        self._exchange.use(intake, data, has_proven_data=same)
        self._look_for_room(message)
        self._train_samples = message["train_samples"]
        self._teacher_precision = message["precision"]
        logger.info(
            "learner on %s, teachers in %s, with %d training images",
            message["device"],
            self._teacher_precision,
            self._train_samples,
        )
        number = self._store.last_round()
        if number < 0:
            return e.LearnerUp()
        self._restore_learner(number)
        return None

    def _require_published_counts(self, intake: Intake) -> None:
        """Of a peer whose disk was lost: are its own images those with which it began, as far as anybody can tell?

        Raises:
            DataError: they are not.
        """
        number = self._store.last_round()
        if number >= 0 and (other := intake.other_counts(self._id, self._store.manifest(number).statistics.counts)):
            raise DataError(
                f"the images are not those with which this peer trained: round {number}, which it got back, counts "
                f"{other[0]} validation images of class {other[1]}, and here are {other[2]}; put the images back as "
                f"they were, or begin a new run"
            )

    def _look_for_room(self, ready: Message) -> None:
        """Once, before the first round of this start: is there disk and memory for a run?

        Raises:
            IncompleteError: the disk does not even have room for one round.
        """
        if not self._has_looked:
            self._has_looked = True
            room = check_room(self._federation, self._host, ready)
            if not room.fits_one_round:
                raise IncompleteError(f"{room.disk.sentence}, and start the same command again")
            for finding in (room.memory, room.disk):
                if finding.level is not Level.OK:
                    logger.warning("%s", finding.sentence)

    def _intake_of(self, ready: Message) -> Intake:
        layouts = {arch: layout_from_json(layout) for arch, layout in ready["layouts"].items()}
        tls = self._tls
        authorities = None if tls is None else lambda: tls.authorities
        known = ready["validation_counts"]  # null where each peer has data of its own
        samples = None if known is None else {int(peer): tuple(counts) for peer, counts in known.items()}
        return Intake(self._federation, layouts, len(ready["class_names"]), authorities, samples=samples)

    def _renew(self) -> None:
        """This peer has new certificate files."""
        self._publisher.renew()
        self._exchange.renew()

    async def _commit(self, message: Message) -> e.Published:
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
            model_round=number,
            missing=work.train.missing if work.train else (),
            quarantined=work.train.quarantined if work.train else (),
        )
        busy = sum(seconds.values()) if number else 0.0  # making the initial model says nothing of a round
        record = RoundRecord(
            peer=self._id,
            round=number,
            snapshot_sha256=manifest.sha256,
            validation_accuracy=statistics.accuracy,
            global_accuracy=message["global_accuracy"],
            peak_global_accuracy=message.get("peak_global_accuracy"),
            train_loss=log["loss"],
            target_mass=log["target_mass"],
            target_collapsed=log["target_collapsed"],
            target_top1=log["target_top1"],
            redone=log["redone"],
            teachers=tuple(each.peer for each in work.consumed),
            missing_teachers=manifest.missing,
            stale_teachers=tuple(peer for peer, _ in work.train.stale) if work.train else (),
            quarantined_teachers=manifest.quarantined,
            quarantine_reasons={str(j): self._exchange.reasons.get(j, "see the log") for j in manifest.quarantined},
            seconds=Seconds(
                wait=max(0.0, work.training_since - work.opened - seconds["teachers"]) if number else 0.0,
                transfer=self._exchange.transfer_seconds - work.transfer,
                **seconds,
            ),
            bytes_sent=self._servicer.bytes_sent - work.bytes_sent,
            bytes_received=self._exchange.bytes_received - work.bytes_received,
        )
        self._peak_rss = max(self._peak_rss, message["peak_rss_bytes"])
        await self._publish(Path(message["folder"]), manifest, record, busy, message["global_accuracy"])
        self._learner_starts = 1
        await self._forget_old(number)
        logger.info(
            "round %d of %d is published, validation accuracy %s",
            number,
            self._federation.rounds,
            _percent(statistics.accuracy),
        )
        return e.Published(number, busy)

    async def _publish(
        self,
        folder: Path,
        manifest: Manifest,
        record: RoundRecord,
        busy: float,
        global_accuracy: float | None = None,
    ) -> None:
        """Durable first, then visible."""
        manifest = await self._publisher.write(folder, manifest, record)
        self._store.record_history()
        self._exchange.published(manifest)
        self._start_work()
        fail_point("before-announce", manifest.round)
        self._publisher.show(busy, global_accuracy)
        fail_point("announced", manifest.round)

    async def _forget_old(self, number: int) -> None:
        """Delete what nobody needs any more."""
        quorum = self._barrier.quorum
        received_from = number - max(1, quorum.max_staleness if quorum else 0)
        await self._exchange.forget_before(received_from)
        outdated = self._store.outdated(self._kept(number), received_from)
        await to_the_end(asyncio.to_thread(self._store.keep_lineage, outdated))
        fail_point("lineage-durable", number)
        self._store.delete(outdated)  # not in a thread: who looks for a round must find all of it, or nothing
        fail_point("pruned", number)

    def _kept(self, number: int) -> set[int]:
        """Own rounds that stay once this one is published: others may need it and the one before, and all the best."""
        return {number, self._version(number - 1), self._best_own()}

    def _version(self, number: int) -> int:
        """The round of this peer's model as of a round."""
        return number if number < 0 else self._federation.version(self._id, number)

    def _best_own(self) -> int:
        """The round of this peer's model as of the best round or, if none is known, its last."""
        return self._store.last_round() if self._best.round is None else self._version(self._best.round)

    def _start_work(self) -> None:
        exchange = self._exchange
        self._work = _RoundWork(
            time.monotonic(), self._servicer.bytes_sent, exchange.bytes_received, exchange.transfer_seconds
        )

    def _load_best(self) -> BestRound:
        best = self._store.load_best()
        if best.round is None or self._store.round_dir(self._version(best.round)).exists():
            return best
        logger.warning("round %d, the best one so far, is not here; the best of the rounds to come stands", best.round)
        return BestRound()

    def _choose_best(self, number: int) -> None:
        if number == self._federation.rounds and self._store.has_result() and self._best.round is not None:
            return  # it was chosen before this start; what others have published since does not change it
        manifests = [self._store.manifest(self._version(number)), *self._exchange.newest_manifests(number)]
        if self._best.offer(number, manifests):
            self._store.save_best(self._best)

    # --- the end ---------------------------------------------------------------------------------------------------

    async def _finish(self, evaluated: Message) -> None:
        """Write this peer's result; from now on it only serves the others."""
        last = self._barrier.published
        statistics = self._store.manifest(self._best_own()).statistics
        result = PeerResult(
            id=self._id,
            arch=self._entry.arch,
            train_samples=self._train_samples,
            teacher_precision=self._teacher_precision,
            rounds_completed=last,
            snapshot_sha256=self._store.manifest(self._store.last_round()).sha256,
            global_accuracy=evaluated["global_accuracy"],
            local_accuracy=evaluated["local_accuracy"],
            global_accuracy_per_class=tuple(evaluated["global_accuracy_per_class"]),
            counts=statistics.counts,
            hits=statistics.hits,
            peak_rss_bytes=max(self._peak_rss, evaluated["peak_rss_bytes"]),
            best_round=self._best.round,
            peak_global_accuracy=evaluated.get("peak_global_accuracy"),
            peak_local_accuracy=evaluated.get("peak_local_accuracy"),
        )
        self._store.save_result(total(self._store.history(), result))
        logger.info(
            "all %d rounds are done; best round %s, %slocal accuracy %s: %s",
            last,
            self._best.round,
            f"global accuracy {_percent(result.global_accuracy)}, " if self._federation.data.has_common_test else "",
            _percent(result.local_accuracy),
            self._host.state_dir / "result.json",
        )
        logger.info("peak memory: learner %d MB, service %d MB", result.peak_rss_bytes >> 20, peak_rss_bytes() >> 20)
        self._learner_task.cancel()
        if self._child is not None:
            await self._child.stop()
        self._ending = Ending(
            self._federation,
            self._store,
            self._status,
            self._barrier,
            self._exchange,
            linger=self._waits.linger,
            had_served_all=self._had_served_all,
        )

    def _bytes_moved(self) -> int:
        return self._servicer.bytes_sent + self._exchange.bytes_received

    async def _say_what_takes_long(self) -> NoReturn:
        """Log what this peer waits for, when it has not changed for a while."""
        standstill = Standstill(self._host.peers_file)
        while True:
            await asyncio.sleep(LONG / 10)
            ways = self._exchange.ways(self._servicer.followed_since)
            for level, sentence in standstill.look(self._barrier.explain(), self._barrier.explained(), ways):
                logger.log(level, "%s", sentence)

    async def _stop_on_signal(self) -> NoReturn:
        name = await self._signals.wait()
        done, rounds = self._barrier.published, self._federation.rounds
        if done == rounds:
            raise IncompleteError(
                f"stopped by {name}; all {rounds} rounds are done, but other peers may still need this one: start the "
                f"same command again to serve them"
            )
        where = f"after round {done} of {rounds}" if done > 0 else "before the end of its first round"
        raise IncompleteError(f"stopped by {name} {where}; start the same command again to continue")

    async def _stop_on_damage(self) -> NoReturn:
        """End when a committed round does not have its bytes any more: nobody can go on with it."""
        while True:
            number, reason = await self._damage.get()
            if number in self._store.kept_rounds():  # still
                raise self._store.damaged(number, reason)

    def _hear_refusal(self, peer: int, number: int, sha256: str, reason: str) -> None:
        """Another peer does not use a snapshot of this one."""
        if number in self._store.kept_rounds() and sha256 in ("", self._store.manifest(number).sha256):
            if self._store.refused_by.note(peer, number, reason):
                logger.warning("peer %d does not use round %d of this peer: %s", peer, number, reason)
        else:
            self._refusals.add(f"peer {peer}", "speaks of a round that is not here")

    async def _save_refusals(self) -> NoReturn:
        while True:
            await asyncio.sleep(_SAVE)
            await to_the_end(asyncio.to_thread(self._refusals.save))  # the end of this peer writes them, too

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
