"""What cannot be saved: the epochs and validations of all peers, one after the other in one process, in CPU seconds.

Started by frameworks.py: alone.py SHARDS ROUNDS RESULT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import setting
import torch


def main(shards: Path, rounds: int, result: Path) -> None:
    torch.set_num_threads(1)
    models = [setting.start_model() for _ in range(setting.PEERS)]
    optimizers = [setting.new_optimizer(model) for model in models]
    seconds = {"train": [0.0] * rounds, "validate": [0.0] * rounds}
    for number in range(-1, rounds):  # the first to warm up
        for peer, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train, validation = setting.shard(shards, peer)
            start = time.process_time()
            setting.train(model, optimizer, train)
            middle = time.process_time()
            setting.accuracy(model, validation)
            if number >= 0:
                seconds["train"][number] += middle - start
                seconds["validate"][number] += time.process_time() - middle
    result.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
