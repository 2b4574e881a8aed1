"""The rounds in p2pfl: nodes in one process, each connected with all others, whose learners are Ray actors.

Started by frameworks.py in p2pfl's virtual environment: with_p2pfl.py SHARDS ROUNDS RESULT.json PROTOCOL
"""

# ruff: noqa: E402, PT019
from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

# Before p2pfl is imported, which starts a Ray of its own where there is none.
ray.init(namespace="p2pfl", include_dashboard=False, _node_ip_address="127.0.0.1")

import lightning as L
import setting
import torch
import torch.nn.functional as F
from datasets import Dataset, DatasetDict
from p2pfl.communication.protocols.protobuff.client import ProtobuffClient
from p2pfl.communication.protocols.protobuff.grpc import GrpcCommunicationProtocol
from p2pfl.communication.protocols.protobuff.memory import MemoryCommunicationProtocol
from p2pfl.learning.aggregators.fedavg import FedAvg
from p2pfl.learning.dataset.p2pfl_dataset import P2PFLDataset
from p2pfl.learning.frameworks.p2pfl_model import P2PFLModel
from p2pfl.learning.frameworks.pytorch.lightning_model import LightningModel
from p2pfl.management.logger import logger
from p2pfl.node import Node
from p2pfl.settings import Settings
from p2pfl.utils.topologies import TopologyFactory, TopologyType
from p2pfl.utils.utils import set_standalone_settings, wait_convergence, wait_to_finish
from torch import Tensor, nn


class Small(L.LightningModule):
    """The common model and optimiser, as Lightning wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = setting.start_model()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return setting.new_optimizer(self)

    def on_before_optimizer_step(self, _optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), setting.CLIP_NORM)

    def training_step(self, batch: dict[str, Tensor], _batch_index: int) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"])

    def test_step(self, batch: dict[str, Tensor], _batch_index: int) -> None:
        right = self(batch["image"]).argmax(-1) == batch["label"]
        self.log("accuracy", right.double().mean(), batch_size=len(right))


def dataset(shards: Path, peer: int) -> P2PFLDataset:
    """A shard in p2pfl's form; its test part is what others validate on."""
    parts = {
        name: Dataset.from_dict({"image": part.images.numpy(), "label": part.labels.numpy()}).with_format("torch")
        for name, part in zip(("train", "test"), setting.shard(shards, peer), strict=True)
    }
    return P2PFLDataset(DatasetDict(parts), batch_size=setting.BATCH, dataset_name="digits")


class Counted(FedAvg):
    """Keeps of how many nodes each mean was that a node went on with."""

    def __init__(self) -> None:
        super().__init__()
        self.contributors: list[int] = []

    def wait_and_get_aggregation(self, *arguments: Any) -> P2PFLModel:
        model = super().wait_and_get_aggregation(*arguments)
        self.contributors.append(len(model.get_contributors()))
        return model


class Sent:
    """Counts the bytes of models that nodes send one another."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()
        log_successful_send = ProtobuffClient.log_successful_send

        def count(client: ProtobuffClient, message) -> None:  # type: ignore[no-untyped-def]
            if message.HasField("weights"):
                with self._lock:
                    self.bytes += len(message.weights.weights)
            log_successful_send(client, message)

        ProtobuffClient.log_successful_send = count


def main(shards: Path, rounds: int, result: Path, protocol: str) -> None:
    set_standalone_settings()  # as p2pfl's own examples do; then what suits one machine better
    logger.set_level("WARNING")
    Settings.gossip.PERIOD = 0.1  # of 0, ten threads would turn without a pause
    Settings.gossip.MODELS_PERIOD, Settings.gossip.MODELS_PER_ROUND = 0.2, len(os.sched_getaffinity(0))
    Settings.gossip.EXIT_ON_X_EQUAL_ROUNDS = 300
    Settings.heartbeat.PERIOD, Settings.heartbeat.TIMEOUT = 5, 60  # nobody is lost here, only late
    Settings.training.RAY_ACTOR_POOL_SIZE = len(os.sched_getaffinity(0))
    sent = Sent()
    nodes = []
    for peer in range(setting.PEERS):
        communication = MemoryCommunicationProtocol() if protocol == "memory" else GrpcCommunicationProtocol()
        address = f"node-{peer}" if protocol == "memory" else "127.0.0.1"
        learned = dataset(shards, peer)
        node = Node(LightningModel(Small()), learned, addr=address, protocol=communication, aggregator=Counted())
        node.start()
        nodes.append(node)
    TopologyFactory.connect_nodes(TopologyFactory.generate_matrix(TopologyType.FULL, len(nodes)), nodes)
    wait_convergence(nodes, len(nodes) - 1, only_direct=False, wait=60)
    nodes[0].set_start_learning(rounds=rounds, epochs=1, trainset_size=len(nodes))
    watch(nodes, rounds)
    means = [number for node in nodes for number in node.aggregator.contributors]
    incomplete = rounds * len(nodes) - means.count(len(nodes))
    said = {"model_bytes_per_round": sent.bytes / rounds, "incomplete_means": incomplete}
    result.write_text(json.dumps({**said, "versions": setting.versions("p2pfl", "torch", "lightning", "ray")}))
    wait_to_finish(nodes, timeout=60)  # after the last round each evaluates once more
    for node in nodes:
        node.stop()
    ray.shutdown()


def watch(nodes: list[Node], rounds: int) -> None:
    """Note each round when the last node has left it. A node's round is None before the first and after the last."""
    finished = 0
    left = dict.fromkeys(range(len(nodes)), 0)
    while finished < rounds:
        time.sleep(0.02)
        for index, node in enumerate(nodes):
            number = rounds if node.learning_workflow.finished else node.state.round
            left[index] = max(left[index], number or 0)
        while finished < min(left.values()):
            finished += 1
            setting.note_round(finished)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
