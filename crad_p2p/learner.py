"""The learner process: one client, driven by messages of one JSON object a line. Imports no grpc.

Commands come on standard input, events go to what was standard output; the two sides exchange file paths, never
tensors. When standard input ends, the service is gone, and the process ends at once, wherever it is: nothing it has not
reported counts.

    command                                                       answer
    {"do": "initialise", "folder": F}                             trained
    {"do": "restore", "round": r, "folder": F, "counts": [n]}     restored
    {"do": "open", "round": r}                                    (none)
    {"do": "teach", "manifest": PATH, "snapshot": PATH}           taught
    {"do": "train", "teachers": [ids], "last": F, "folder": F}    trained
    {"do": "evaluate", "snapshot": PATH}                          evaluated

``counts`` are the class counts that the round was published with. ``last`` is the folder of the last committed round,
for training that diverges. Before the first command it reports ``ready``; in between ``progress``, and ``warning`` and
``note`` with a sentence for the log; and ``failed`` before it ends with an error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np
import torch

from crad_p2p.client import Client
from crad_p2p.data.datasets import load_dataset
from crad_p2p.data.own.peers import common_test_of, site_of
from crad_p2p.data.own.site import Cache
from crad_p2p.data.own.summary import TABLE_FILE
from crad_p2p.data.partition import partition_digest, transfer_set, validation_counts
from crad_p2p.data.shards import Shard, shards_of
from crad_p2p.device import memory_of, resolve_device, resolve_precision
from crad_p2p.distillation import EpochLog
from crad_p2p.errors import CradError, ExitCode, LearnerFailedError
from crad_p2p.failpoints import fail_point
from crad_p2p.federation import Federation, load_federation
from crad_p2p.footprint import kept_by_step
from crad_p2p.manifest import Manifest
from crad_p2p.memory import peak_rss_bytes
from crad_p2p.methods.build import layouts_of
from crad_p2p.parent import end_with_parent
from crad_p2p.privacy import load_key
from crad_p2p.snapshot import CHECKPOINT_FILE, SNAPSHOT_FILE, SnapshotError, layout_to_json

#: What numpy and torch import only when they need it: for a process that becomes many learners (``crad_p2p.forking``).
LATER = ("numpy.ctypeslib", "numpy.ma", "numpy.random", "torch.utils._device")
#: Of own images, in the state directory.
_CACHE = "images"
#: Seconds between two progress events of one phase.
_PROGRESS_INTERVAL = 0.2
#: Fail points in the middle of a phase.
_MIDDLE = {"teachers": "teaching", "train": "training"}


class Learner:
    """Carries out commands on a :class:`Client`."""

    def __init__(self, federation: Federation, arguments: argparse.Namespace, events: TextIO) -> None:
        """Load the data and report ``ready``."""
        self._federation = federation
        self._events = events
        self._teacher_seconds = 0.0
        self._last_progress = ("", 0.0)
        device = resolve_device(arguments.device)
        precision = resolve_precision(arguments.precision, device)
        shard, facts = self._own_images(arguments) if federation.data.is_own else self._common_images(arguments)
        dataset = shard.dataset
        self._client = Client(
            federation,
            arguments.id,
            dataset,
            shard.split,
            device=device,
            precision=precision,
            folder=arguments.scratch,
            count_key=load_key(arguments.count_key) if arguments.count_key else None,
            progress=self.progress,
            warn=lambda text: self.emit("warning", message=text),
        )
        classes, image_shape = len(dataset.class_names), dataset.train.images.shape[1:]
        layouts = layouts_of(federation, classes=classes, image_shape=image_shape)
        free_bytes, total_bytes = memory_of(device) or (None, None)
        self.emit(
            "ready",
            train_samples=self._client.train_samples,
            class_names=list(dataset.class_names),
            image_shape=list(image_shape),
            **facts,
            device=str(device),
            precision=str(precision).removeprefix("torch."),
            layouts={key: layout_to_json(layout) for key, layout in layouts.items()},
            # Of a device with memory of its own; else null.
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            batch_bytes=kept_by_step(
                federation, federation.peer(arguments.id).arch, classes=classes, image_shape=image_shape
            ),
        )

    def _common_images(self, arguments: argparse.Namespace) -> tuple[Shard, dict[str, Any]]:
        """This peer's part of the common data set, and what ``ready`` says of it."""
        federation = self._federation
        data_dir = arguments.data_dir or arguments.peers.parent
        dataset = load_dataset(federation.data, seed=federation.seed, data_dir=data_dir, download=arguments.download)
        labels, groups, shards = dataset.train.labels, dataset.train.groups, shards_of(federation, dataset)
        splits = {peer: shard.split for peer, shard in shards.items()}
        own = splits[arguments.id]
        transfer = dataset.train.images[transfer_set(labels, federation.data, federation.seed)]
        return shards[arguments.id], {
            # How many groups there are to learn from, to validate and to test; null where shards are not made of them.
            "groups": None
            if groups is None
            else [len(np.unique(groups[part])) for part in (own.train, own.validation, own.test)],
            "partition_digest": partition_digest(labels, splits, transfer, groups),
            "validation_counts": validation_counts(labels, splits, len(dataset.class_names)),
        }

    def _own_images(self, arguments: argparse.Namespace) -> tuple[Shard, dict[str, Any]]:
        """The images of this site, and what ``ready`` says of them; counts of others nobody knows here."""
        state, peer = arguments.state_dir, arguments.id
        cache = Cache(state / _CACHE)
        if arguments.look_only:
            cache = Cache(arguments.scratch / _CACHE, (cache.folder,))

        def progress(done: int, total: int) -> None:
            # In hundredths, since others see it, and the number of images is not theirs to know.
            self.progress("images", 100 * done // total, 100)

        test = common_test_of(self._federation, cache, progress)
        site = site_of(self._federation, peer, cache, place=arguments.data, test=test, progress=progress)
        if not arguments.look_only:
            site.summary.write(state)
            for line in (*site.summary.log_lines(), *site.summary.notes()):
                self.emit("note", message=line)
            for line in site.summary.warnings():
                self.emit("warning", message=f"{line}: see {state / TABLE_FILE}")
        shard = Shard(site.dataset, site.split)
        return shard, {
            "partition_digest": "",
            "test_digest": "" if test is None else test.digest,
            "validation_counts": validation_counts(
                site.dataset.train.labels, {peer: site.split}, len(site.dataset.class_names)
            ),
            "groups": None,
            "own": {
                "digest": site.digest,
                "summary": site.summary.in_short(),
                "warnings": [*site.summary.warnings()],
                "classes": len(site.summary.images) - len(site.summary.lacking),
            },
        }

    def emit(self, event: str, **fields: Any) -> None:
        """Send one event."""
        self._events.write(json.dumps({"event": event, **fields}) + "\n")
        self._events.flush()

    def progress(self, phase: str, step: int, steps: int) -> None:
        """Report progress, not too often, but each new phase and its last step."""
        if phase in _MIDDLE and 2 * step >= steps:
            fail_point(_MIDDLE[phase], self._client.next_round)
        now = time.monotonic()
        last_phase, last_time = self._last_progress
        if phase != last_phase or step == steps or now - last_time >= _PROGRESS_INTERVAL:
            self._last_progress = (phase, now)
            self.emit("progress", phase=phase, step=step, steps=steps)

    def carry_out(self, command: dict[str, Any]) -> None:
        """Run one command to its end."""
        match command["do"]:
            case "initialise":
                self._client.initialise()
                self._finish_round(EpochLog(), 0.0, Path(command["folder"]))
            case "restore":
                self._restore(command["round"], Path(command["folder"]), command["counts"])
            case "open":
                start = time.monotonic()
                self._client.open_round(command.get("round"))
                self._teacher_seconds = time.monotonic() - start  # the own model may be a teacher
                fail_point("opened", self._client.next_round)
            case "teach":
                self._teach(Manifest.from_bytes(Path(command["manifest"]).read_bytes()), Path(command["snapshot"]))
            case "train":
                start = time.monotonic()
                last = Path(command["last"])
                with _undamaged(last):
                    log = self._client.train(command["teachers"], lambda: _read_round(last))
                self._finish_round(log, time.monotonic() - start, Path(command["folder"]))
            case "evaluate":
                snapshot = Path(command["snapshot"])
                with _undamaged(snapshot.parent):
                    evaluation = self._client.evaluate(snapshot.read_bytes(), self._beside(snapshot.parent))
                self.emit("evaluated", **asdict(evaluation), peak_rss_bytes=peak_rss_bytes())

    def _beside(self, folder: Path) -> bytes | None:
        """The checkpoint of a committed round, if evaluating its snapshot needs it."""
        return (folder / CHECKPOINT_FILE).read_bytes() if self._federation.method.needs_checkpoint else None

    def _restore(self, number: int, folder: Path, counts: list[int]) -> None:
        with _undamaged(folder):
            self._client.restore(number, *_read_round(folder), counts)
        self.emit("restored", round=number)

    def _teach(self, manifest: Manifest, path: Path) -> None:
        start = time.monotonic()
        reason = None
        try:
            self._client.teach(manifest, path.read_bytes())
        except SnapshotError as error:
            reason = str(error)
        self._teacher_seconds += time.monotonic() - start
        fail_point("taught", self._client.next_round)
        self.emit("taught", peer=manifest.peer, round=manifest.round, usable=reason is None, reason=reason)

    def _finish_round(self, log: EpochLog, train_seconds: float, folder: Path) -> None:
        start, number = time.monotonic(), self._client.round
        fail_point("trained", number)
        statistics = self._client.validate()
        fail_point("validated", number)
        snapshot = self._client.snapshot()
        (folder / SNAPSHOT_FILE).write_bytes(snapshot)
        fail_point("snapshot-written", number)
        (folder / CHECKPOINT_FILE).write_bytes(self._client.checkpoint())
        fail_point("checkpoint-written", number)
        evaluation = None
        if self._federation.evaluates_after(number):
            evaluation = self._client.evaluate(snapshot, self._client.kept_beside())
        self.emit(
            "trained",
            round=number,
            folder=str(folder),
            size=len(snapshot),
            sha256=hashlib.sha256(snapshot).hexdigest(),
            statistics=statistics.model_dump(),
            global_accuracy=evaluation.global_accuracy if evaluation else None,
            peak_global_accuracy=evaluation.peak_global_accuracy if evaluation else None,
            log=asdict(log),
            seconds={
                "teachers": self._teacher_seconds,
                "train": train_seconds,
                "validate": time.monotonic() - start,
            },
            peak_rss_bytes=peak_rss_bytes(),
        )


def _read_round(folder: Path) -> tuple[bytes, bytes]:
    return (folder / SNAPSHOT_FILE).read_bytes(), (folder / CHECKPOINT_FILE).read_bytes()


@contextmanager
def _undamaged(folder: Path) -> Iterator[None]:
    """Say of a committed round whose files cannot be used where they lie."""
    try:
        yield
    except SnapshotError as error:
        raise LearnerFailedError(f"{folder} is damaged: {error}; restore the state directory's disk") from None


def main() -> None:
    """Entry point of the process; started by the service, never by hand."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--id", type=int, required=True)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--download", action="store_true")
    parser.add_argument("--data")
    parser.add_argument("--state-dir", type=Path)
    parser.add_argument("--look-only", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--count-key", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the service decides
    # Should this process be stopped when its service is killed, it would not see its input end, go on holding memory,
    # and, continued one day, write where its successor works.
    end_with_parent(signal.SIGKILL)
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a stray print must not look like an event
    commands = _read_commands()
    try:
        run(arguments, events, commands)
    except CradError as error:
        _fail(events, error.exit_code, str(error))
    except OSError as error:
        what = f"{error.filename or arguments.scratch.parent}: {error.strerror or error}"
        _fail(events, ExitCode.INCOMPLETE, f"{what}; mend it, and start the same command again to continue")
    except torch.OutOfMemoryError as error:
        advice = "use a smaller batch or architecture, or --device cpu"
        _fail(events, ExitCode.LEARNER_FAILED, f"out of memory on {arguments.device}: {error}; {advice}")


def _fail(events: TextIO, exit_code: ExitCode, message: str) -> NoReturn:
    print(json.dumps({"event": "failed", "exit_code": exit_code, "message": message}), file=events, flush=True)
    sys.exit(exit_code)


def run(arguments: argparse.Namespace, events: TextIO, commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Load everything, report ``ready``, then carry out commands for ever."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    learner = Learner(load_federation(arguments.peers, arguments.data_dir), arguments, events)
    while True:
        learner.carry_out(commands.get())


def _read_commands() -> queue.SimpleQueue[dict[str, Any]]:
    """Read standard input in a thread, so that its end is noticed in the middle of a step."""
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return commands


if __name__ == "__main__":
    main()
