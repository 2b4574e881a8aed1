"""The learner of this host, started for a moment: does it find its data, and its device?"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crad_p2p.errors import ConfigurationError, CradError, LearnerFailedError, error_of
from crad_p2p.federation import Federation
from peer._proto.crad.v1 import peer_pb2
from peer.findings import Finding, failed_by, ok, warning
from peer.host import Host
from peer.learner_process import LearnerProcess, how_it_ended
from peer.room import Room, check_room

Message = Mapping[str, Any]


async def ask_learner(federation: Federation, host: Host) -> tuple[Message, Room]:
    """What a learner says when it is ready, and what room there is then. It writes nowhere but in a temporary folder.

    Raises:
        CradError: it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="crad-check-") as folder:
        child = await LearnerProcess.start(host.learner_arguments(Path(folder, "scratch"), look_only=True))
        try:
            async for message in child.events():
                if message["event"] == "failed":
                    raise error_of(message["exit_code"], message["message"])
                if message["event"] == "ready":
                    return message, check_room(federation, host, message)
            raise LearnerFailedError(
                f"the learner process {how_it_ended(await child.wait())} while it started; the lines above say why, or "
                f"the system's log if it ran out of memory"
            )
        finally:
            await child.stop()


def describe_data(ready: Message, federation: Federation, own_id: int) -> Finding:
    """What the learner has found."""
    if own := ready.get("own"):
        return _describe_own(ready, own)
    count, classes = ready["train_samples"], len(ready["class_names"])
    channels, height, width = ready["image_shape"]
    if not count:
        trains = "no training image falls to this peer, so that its model stays as it begins"
    else:
        trains = f"{count} training image{'s' if count > 1 else ''} here"
    return ok(
        "data",
        f"{trains}{_describe_groups(ready, federation, own_id)}; {classes} classes, images "
        f"{channels}x{height}x{width}, all labels in range; learner on {ready['device']}",
    )


def _describe_groups(ready: Message, federation: Federation, own_id: int) -> str:
    """Of a shard of whole groups: how many there are, and what their hold-out lacks; nothing of other shards."""
    if ready["groups"] is None:
        return ""
    learn, validate, test = ready["groups"]
    counts, least = ready["validation_counts"][str(own_id)], federation.method.min_support
    rare = [name for name, count in zip(ready["class_names"], counts, strict=True) if count < least]
    lacks = f"; to validate there are fewer than {least} images of {', '.join(rare)}" if rare else ""
    return (
        f", of {learn} group{'s' if learn > 1 else ''} by {federation.data.partition.by}, with {validate} more to "
        f"validate and {test} to test{lacks}"
    )


def _describe_own(ready: Message, own: Message) -> Finding:
    """The images of this site."""
    said = (
        f"{own['summary']}; {own['classes']} of {len(ready['class_names'])} classes are here, images "
        f"{'x'.join(map(str, ready['image_shape']))}; learner on {ready['device']}"
    )
    if own["warnings"]:
        return warning(
            "data",
            f"{said}; {'; '.join(own['warnings'])}",
            "look at these; data-summary.txt in the state directory names them once the peer is started",
        )
    return ok("data", said)


def describe_failure(error: CradError) -> Finding:
    """What kept it from becoming ready, which is not always the data."""
    kind = {ConfigurationError: "device", LearnerFailedError: "learner"}.get(type(error), "data")
    return failed_by(kind, error)


def data_message(ready: Message) -> peer_pb2.Data:
    """The data as peers tell one another."""
    return peer_pb2.Data(
        class_names=ready["class_names"],
        image_shape=ready["image_shape"],
        partition_digest=ready["partition_digest"],
        test_digest=ready.get("test_digest", ""),
    )
