"""With this folder on PYTHONPATH the learner is a few lines in place of torch: ready at once, and slow only if told.

Python imports this module at every start; a fork server it ends at once. In any other process but a learner it does
nothing, unless LIGHT_SIGNAL is ``NUMBER@MODULE``: the process then gets this signal when it imports that module. So all
of ``crad-peer`` is the real one, and a test decides when a peer trains and what it publishes. The folder LIGHT_CONTROL
may hold, for one peer (``NAME-ID``) or for all (``NAME``):

    hold     no round from this number on is trained while the file is there
    seconds  how long a round takes
    die      the learner is killed at its start while the file is there
    fail     the round in place of which the learner ends, as one does whose data cannot be used
    misname  the round in whose snapshot the tensor has another name, so that nobody may use it
    poison   the round whose snapshot has weights that are not finite: other learners find them so
    lie      the round in which one validation sample has gone
    salt     mixed into the weights, which are otherwise the same whenever a round is trained; ``SALT@N`` from round N
             on; of one process in the environment as LIGHT_SALT

LIGHT_FLOATS is the size of the models, a multiple of 8. LIGHT_CLASSES are two names of classes.
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
from pathlib import Path
from typing import Any

FLOATS = int(os.environ.get("LIGHT_FLOATS", "8"))
HEADER = b'{"weights":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (FLOATS, 4 * FLOATS)
POISON = b"\x00\x00\xc0\x7f"  # NaN
CLASSES = os.environ.get("LIGHT_CLASSES", "even,odd").split(",")
LAYOUT = {"weights": ["F32", [FLOATS]]}


def weights(peer: int, number: int, salt: str = "") -> bytes:
    """The snapshot of a round."""
    data = hashlib.sha256(f"{peer} {number} {salt}".encode()).digest()
    return len(HEADER).to_bytes(8, "little") + HEADER + data * (FLOATS // 8)


class Learner:
    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.last = -1
        self.opened = 0
        self.commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in sys.stdin:
            self.commands.put(json.loads(line))
        os._exit(0)

    def setting(self, name: str) -> str | None:
        for path in (f"{name}-{self.peer}", name):
            try:
                return Path(os.environ["LIGHT_CONTROL"], path).read_text().strip()
            except FileNotFoundError:
                continue
        return None

    def emit(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, "peak_rss_bytes": 1, **fields}), flush=True)

    def train(self, number: int, folder: str) -> None:
        if self.setting("fail") == str(number):
            self.emit("failed", exit_code=8, message="no more images")
            os._exit(8)
        while number >= int(self.setting("hold") or number + 1):
            time.sleep(0.005)
        seconds = float(self.setting("seconds") or 0.02)
        time.sleep(seconds)
        salt, _, since = (self.setting("salt") or os.environ.get("LIGHT_SALT", "")).partition("@")
        snapshot = weights(self.peer, number, salt if number >= int(since or 0) else "")
        if self.setting("misname") == str(number):
            snapshot = snapshot.replace(b"weights", b"weirdly")
        if self.setting("poison") == str(number):
            snapshot = snapshot[: -len(POISON)] + POISON
        Path(folder, "snapshot.safetensors").write_bytes(snapshot)
        Path(folder, "checkpoint.safetensors").write_bytes(b"momentum")
        self.last = number
        samples = 999 if self.setting("lie") == str(number) else 1000
        self.emit(
            "trained",
            round=number,
            folder=folder,
            size=len(snapshot),
            sha256=hashlib.sha256(snapshot).hexdigest(),
            # Better from round to round, so that the best one is the last.
            statistics={"counts": [samples, 0], "hits": [min(number, samples), 0], "predicted": [samples, 0]},
            global_accuracy=None,
            log={"loss": 1.0, "target_mass": None, "target_collapsed": None, "target_top1": None, "redone": 0},
            seconds={"teachers": 0.0, "train": seconds, "validate": 0.0},
        )

    def run(self) -> None:
        if self.setting("die") is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        ready = {"train_samples": 1, "device": "cpu", "class_names": CLASSES, "image_shape": [1, 8, 8]}
        ready.update(precision="float32", partition_digest="ab" * 32, validation_counts=None, groups=None)
        ready.update(free_bytes=None, total_bytes=None, batch_bytes=0)
        self.emit("ready", layouts={"cnn6@0.125": LAYOUT}, **ready)
        while True:
            command = self.commands.get()
            match command["do"]:
                case "initialise":
                    self.train(0, command["folder"])
                case "restore":
                    self.last = command["round"]
                    Path(command["folder"], "snapshot.safetensors").read_bytes()
                    self.emit("restored", round=self.last)
                case "teach":
                    snapshot = Path(command["snapshot"]).read_bytes()
                    manifest = json.loads(Path(command["manifest"]).read_bytes())
                    if hashlib.sha256(snapshot).hexdigest() != manifest["sha256"]:
                        self.emit("failed", exit_code=8, message=f"{command['snapshot']} is not that of its manifest")
                        os._exit(8)
                    usable = not snapshot.endswith(POISON)
                    reason = None if usable else "tensor 'weights' holds values that are not finite"
                    taught = {"peer": manifest["peer"], "round": manifest["round"]}
                    self.emit("taught", **taught, usable=usable, reason=reason)
                case "open":
                    self.opened = command["round"]
                case "train":
                    Path(command["last"], "snapshot.safetensors").read_bytes()  # where it would go on if it diverged
                    self.train(self.opened, command["folder"])
                case "evaluate":
                    Path(command["snapshot"]).read_bytes()
                    self.emit("evaluated", global_accuracy=0.5, local_accuracy=0.5, global_accuracy_per_class=[0.5])


class Signaller:
    """Finds no module; sends the signal at the first attempt to find a certain one."""

    def __init__(self, number: str, module: str) -> None:
        self.number = int(number)
        self.module = module

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.module:
            self.module = ""
            os.kill(os.getpid(), self.number)


if "LIGHT_SIGNAL" in os.environ:
    sys.meta_path.insert(0, Signaller(*os.environ["LIGHT_SIGNAL"].split("@")))  # type: ignore[arg-type]
if "crad_p2p.forking" in sys.orig_argv:
    os._exit(0)  # it would import torch, and make learners that are not light
if "crad_p2p.learner" in sys.orig_argv:
    parser = argparse.ArgumentParser()
    parser.add_argument("--id", type=int)
    try:
        Learner(parser.parse_known_args(sys.orig_argv)[0].id).run()
    finally:
        os._exit(1)
