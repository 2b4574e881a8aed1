"""The rounds in Flower's simulation: FedAvg, all clients in every round, as many Ray actors at a time as cores.

Started by frameworks.py in Flower's virtual environment: with_flower.py SHARDS ROUNDS RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import setting
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

SHARDS, ROUNDS, RESULT = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One local epoch from the server's model, and its accuracy on the peer's validation images."""
    torch.set_num_threads(1)
    samples, validation = setting.shard(SHARDS, int(context.node_config["partition-id"]))
    model = setting.start_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    setting.train(model, setting.new_optimizer(model), samples)
    metrics = {"accuracy": setting.accuracy(model, validation), "num-examples": len(samples.labels)}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=message)


@server_app.main()
def serve(grid: Grid, _context: Context) -> None:
    """The rounds. What Flower calls after each of them only notes the time."""

    def note(number: int, _arrays: ArrayRecord) -> None:
        if number:
            setting.note_round(number)

    # Clients have validated the models that they trained, so there is no second trip to validate the mean.
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=setting.PEERS, min_available_nodes=setting.PEERS)
    initial = ArrayRecord(setting.start_model().state_dict())
    result = strategy.start(grid, initial, num_rounds=ROUNDS, train_config=ConfigRecord(), evaluate_fn=note)
    accuracies = {number: metrics["accuracy"] for number, metrics in result.train_metrics_clientapp.items()}
    # No message is counted by Flower: every client gets one model and gives one back.
    size = sum(array.numpy().nbytes for array in initial.values())
    said = {"accuracies": accuracies, "model_bytes_per_round": 2 * setting.PEERS * size}
    RESULT.write_text(json.dumps({**said, "versions": setting.versions("flwr", "torch", "ray")}))


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=setting.PEERS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"_node_ip_address": "127.0.0.1"},
        },
    )
