"""All clients of a federation in one process, without network: the reference that the mesh must match byte for byte."""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from crad_p2p.client import Client, Evaluation
from crad_p2p.data.datasets import Dataset
from crad_p2p.data.shards import Shard, shards_of
from crad_p2p.federation import Federation
from crad_p2p.manifest import Consumed, Manifest
from crad_p2p.memory import peak_rss_bytes
from crad_p2p.privacy import KEY_BYTES
from crad_p2p.results import BestRound, PeerResult, RoundRecord, Seconds, Summary, mean, total
from crad_p2p.snapshot import SnapshotError

#: Called after every round with its number and one record for each client that took part, in id order.
OnRound = Callable[[int, Sequence[RoundRecord]], None]

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """A client's snapshot, what it says of it, and what the client keeps for itself to evaluate it."""

    manifest: Manifest
    snapshot: bytes
    beside: bytes | None = None


#: Called after the last round with what every client has published last, in id order.
OnEnd = Callable[[Sequence[Published]], None]


def simulate(
    federation: Federation,
    images: Dataset | Mapping[int, Shard],
    *,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    threads: int,
    workers: int = 1,
    count_keys: Mapping[int, bytes] | None = None,
    on_round: OnRound = lambda _number, _records: None,
    on_end: OnEnd = lambda _published: None,
) -> tuple[Summary, list[RoundRecord]]:
    """Run every round of a federation.

    Args:
        images: a common data set, or what each peer has, by id.
        precision: in which teachers compute: float32 or bfloat16.
        threads: torch threads of each client; results are bit-identical for equal threads only.
        workers: clients that compute at the same time. Changes the time, never the result.
        count_keys: for federations with noise on the class counts, the secret of every peer, by id. Without them each
            run draws its own, and no two are alike.
    """
    if count_keys is None:
        count_keys = {peer: secrets.token_bytes(KEY_BYTES) for peer in federation.ids}
    shards = shards_of(federation, images) if isinstance(images, Dataset) else images
    return _Simulation(federation, shards, device, precision, threads, workers, count_keys, on_round, on_end).run()


class _Simulation:
    def __init__(
        self,
        federation: Federation,
        shards: Mapping[int, Shard],
        device: torch.device,
        precision: torch.dtype,
        threads: int,
        workers: int,
        count_keys: Mapping[int, bytes],
        on_round: OnRound,
        on_end: OnEnd,
    ) -> None:
        self._federation = federation
        self._digest = federation.digest()
        self._shards = shards
        self._device = device
        self._precision = precision
        self._threads = threads
        self._workers = workers
        self._count_keys = count_keys
        self._on_round = on_round
        self._on_end = on_end
        self._history: list[RoundRecord] = []

    def run(self) -> tuple[Summary, list[RoundRecord]]:
        start = time.monotonic()
        with self._clients() as clients, self._pool() as pool:
            published = list(pool.map(self._first, clients))
            best, kept = BestRound(), published
            for number in range(1, self._federation.rounds + 1):
                last, active = published, self._federation.active(number)
                taking_part = [client for client in clients if client.id in active]
                steps = list(pool.map(lambda client: self._round(client, number, last), taking_part))  # noqa: B023
                new = {each.manifest.peer: each for each, _ in steps}
                published = [new.get(each.manifest.peer, each) for each in last]
                if best.offer(number, [each.manifest for each in published]):
                    kept = published
                records = [record for _, record in steps]
                self._history += records
                self._on_round(number, records)
            self._on_end(published)
            evaluations = list(
                pool.map(
                    lambda pair: pair[0].evaluate(pair[1].snapshot, pair[1].beside), zip(clients, kept, strict=True)
                )
            )
        results = [
            self._result(client, at_best, at_end, evaluation, best.round)
            for client, at_best, at_end, evaluation in zip(clients, kept, published, evaluations, strict=True)
        ]
        summary = Summary(
            federation=self._federation.federation,
            config_digest=self._digest,
            method=self._federation.method.name,
            transport="memory",
            rounds=self._federation.rounds,
            complete=True,
            best_round=best.round,
            mean_global_accuracy=mean(result.global_accuracy for result in results),
            mean_local_accuracy=mean(result.local_accuracy for result in results),
            wall_seconds=time.monotonic() - start,
            peers=tuple(results),
        )
        return summary, self._history

    @contextmanager
    def _clients(self) -> Iterator[list[Client]]:
        folder = Path(tempfile.mkdtemp(prefix="crad-simulate-"))
        try:
            yield [
                Client(
                    self._federation,
                    i,
                    self._shards[i].dataset,
                    self._shards[i].split,
                    device=self._device,
                    precision=self._precision,
                    folder=folder / str(i),
                    count_key=self._count_keys[i],
                    warn=functools.partial(logger.warning, "peer %d: %s", i),
                )
                for i in self._federation.ids
            ]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _pool(self) -> Iterator[ThreadPoolExecutor]:
        # torch keeps its thread count per calling thread, so every worker sets its own.
        with ThreadPoolExecutor(self._workers, initializer=torch.set_num_threads, initargs=(self._threads,)) as pool:
            yield pool

    def _first(self, client: Client) -> Published:
        client.initialise()
        return self._publish(client, ())

    def _round(self, client: Client, number: int, last: Sequence[Published]) -> tuple[Published, RoundRecord]:
        clock = [time.monotonic()]
        client.open_round(number)
        expected = self._federation.teachers_of(client.id, number)
        teachers = [each for each in last if each.manifest.peer in expected]
        quarantined = dict[int, str]()
        for teacher in teachers:
            try:
                client.teach(teacher.manifest, teacher.snapshot)
            except SnapshotError as error:
                quarantined[teacher.manifest.peer] = str(error)
        teachers = [each for each in teachers if each.manifest.peer not in quarantined]
        clock.append(time.monotonic())
        (own,) = (each.snapshot for each in last if each.manifest.peer == client.id)
        checkpoint = client.checkpoint()  # training changes the momentum; this is gone when the round is over
        log = client.train([teacher.manifest.peer for teacher in teachers], lambda: (own, checkpoint))
        clock.append(time.monotonic())
        published = self._publish(client, teachers, tuple(quarantined))
        evaluation = None
        if self._federation.evaluates_after(client.round):
            evaluation = client.evaluate(published.snapshot, published.beside)
        clock.append(time.monotonic())
        record = RoundRecord(
            peer=client.id,
            round=client.round,
            snapshot_sha256=published.manifest.sha256,
            validation_accuracy=published.manifest.statistics.accuracy,
            global_accuracy=evaluation.global_accuracy if evaluation else None,
            peak_global_accuracy=evaluation.peak_global_accuracy if evaluation else None,
            train_loss=log.loss,
            target_mass=log.target_mass,
            target_collapsed=log.target_collapsed,
            target_top1=log.target_top1,
            redone=log.redone,
            teachers=tuple(teacher.manifest.peer for teacher in teachers),
            quarantined_teachers=tuple(quarantined),
            quarantine_reasons={str(peer): reason for peer, reason in quarantined.items()},
            seconds=Seconds(teachers=clock[1] - clock[0], train=clock[2] - clock[1], validate=clock[3] - clock[2]),
        )
        return published, record

    def _publish(self, client: Client, teachers: Sequence[Published], quarantined: Sequence[int] = ()) -> Published:
        snapshot = client.snapshot()
        manifest = Manifest(
            run=self._digest,
            peer=client.id,
            round=client.round,
            arch=client.arch,
            size=len(snapshot),
            sha256=hashlib.sha256(snapshot).hexdigest(),
            statistics=client.validate(),
            consumed=tuple(
                Consumed(peer=t.manifest.peer, round=t.manifest.round, sha256=t.manifest.sha256) for t in teachers
            ),
            model_round=client.round,
            missing=(),
            quarantined=tuple(quarantined),
        )
        return Published(manifest, snapshot, client.kept_beside())

    def _result(
        self, client: Client, best: Published, last: Published, evaluation: Evaluation, best_round: int | None
    ) -> PeerResult:
        result = PeerResult(
            id=client.id,
            arch=client.arch,
            train_samples=client.train_samples,
            rounds_completed=self._federation.rounds,
            snapshot_sha256=last.manifest.sha256,
            global_accuracy=evaluation.global_accuracy,
            local_accuracy=evaluation.local_accuracy,
            global_accuracy_per_class=evaluation.global_accuracy_per_class,
            counts=best.manifest.statistics.counts,
            hits=best.manifest.statistics.hits,
            peak_rss_bytes=peak_rss_bytes(),
            best_round=best_round,
            teacher_precision=str(self._precision).removeprefix("torch."),
            peak_global_accuracy=evaluation.peak_global_accuracy,
            peak_local_accuracy=evaluation.peak_local_accuracy,
        )
        return total((record for record in self._history if record.peer == client.id), result)
