"""The teacher pass against the literal loop of Algorithm 1, which holds all teachers and runs each on every batch.

    python benchmarks/teachers.py                          # nine teachers of the paper's pool, on digits at 32x32
    python benchmarks/teachers.py --images 256 --runs 3 --json teachers.json
    python benchmarks/teachers.py --data ../data/cifar10.npz

Both compute the same posteriors of the same images, one after the other, several times; what counts is CPU seconds, as
a ratio within each run. Teachers are trained for a moment first, and kept in --cache: predictions of untrained ones
say nothing of how many targets change. Printed as well: how far the targets are from those of the literal loop, and
what part of the speed of a matrix product (torch.mm, same precision) the pass reaches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from report import in_words, spread, write
from torch import Tensor, nn

from crad_p2p.aggregation import aggregate
from crad_p2p.architectures import build_model, initialise
from crad_p2p.data.epoch import LocalEpoch, draw_epoch
from crad_p2p.device import resolve_precision
from crad_p2p.frozen import frozen
from crad_p2p.sgd import Sgd
from crad_p2p.statistics import measure
from crad_p2p.teachers import PosteriorStore, inference_batch

POOL = ("resnet18", "resnet18-half", "cnn6")
SHAPE, CLASSES, TEACHERS, TEMPERATURE, BATCH = (3, 32, 32), 10, 9, 3.0, 64
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512, help="of the local epoch")
    parser.add_argument("--epochs", type=int, default=4, help="that a teacher is trained for")
    parser.add_argument("--own-images", type=int, default=600, help="that a teacher is trained on, at most")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu (measured in CPU seconds) or cuda (in wall seconds)")
    parser.add_argument("--precision", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--data", type=Path, help="an npz file with train_images and train_labels, 32x32 RGB")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "crad-benchmark-teachers"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    images, labels = load(arguments.data)
    folder = arguments.cache / (arguments.data.stem if arguments.data else "digits")
    states = [
        (arch, {name: value.to(device) for name, value in state.items()})
        for arch, state in teachers(folder, images, labels, device, arguments)
    ]
    own, held_out = (
        np.resize(np.arange(start, len(labels)), arguments.images)  # again from the start, if there are too few
        for start in (len(labels) - min(arguments.images, len(labels) // 4), len(labels) // 2)
    )
    epoch, held_out = (epoch_of(images[chosen], labels[chosen], device) for chosen in (own, held_out))
    statistics = [measure(frozen(arch, CLASSES, SHAPE).bind(state), held_out, CLASSES) for arch, state in states]
    counts, hits = (torch.tensor([getattr(each, name) for each in statistics]) for name in ("counts", "hits"))
    kind = "wall" if device.type == "cuda" else "CPU"
    figures = {}
    for name in arguments.precision:
        precision = resolve_precision(name, device)
        ratios, literal, streamed = [], [], []
        for _ in range(arguments.runs):
            seconds, expected = timed(partial(literal_loop, states, epoch))
            literal.append(seconds)
            seconds, found = timed(partial(teacher_pass, states, epoch, precision))
            streamed.append(seconds)
            ratios.append(literal[-1] / streamed[-1])
        before, after = (aggregate(each, counts, hits).target for each in (expected, found))
        same = float((before.argmax(-1) == after.argmax(-1)).double().mean())
        off = float((before - after).abs().mean())
        share = flops(epoch) / min(streamed) / speed_of_mm(precision, device)
        print(
            f"{name}: {in_words(ratios)} times faster in {kind} seconds; targets: top-1 the same on "
            f"{100 * same:.2f} %, mean absolute difference {off:.1e}; {100 * share:.0f} % of the speed of torch.mm"
        )
        figures[name] = {
            "ratio": spread(ratios),
            "literal_seconds": spread(literal),
            "pass_seconds": spread(streamed),
            "images_a_second": TEACHERS * arguments.images / min(streamed),
            "targets_with_the_same_top1": same,
            "mean_absolute_difference": off,
            "share_of_mm_speed": share,
        }
    write(
        arguments.json,
        "teachers",
        {"device": arguments.device, "images": arguments.images, "teachers": TEACHERS, "precision": figures},
    )


State = dict[str, Tensor]


def literal_loop(states: list[tuple[str, State]], epoch: LocalEpoch) -> Tensor:
    """All teachers resident, batch by batch, float32: posteriors [J, n, C]."""
    models = [model_of(arch, state).to(epoch.images.device).eval() for arch, state in states]
    batches = []
    with torch.no_grad():
        for batch in epoch.batches:
            pixels = epoch.pixels(batch)
            batches.append(torch.stack([torch.softmax(model(pixels) / TEMPERATURE, -1).cpu() for model in models]))
    return torch.cat(batches, 1)


def teacher_pass(states: list[tuple[str, State]], epoch: LocalEpoch, precision: torch.dtype) -> Tensor:
    """One teacher after the other, as the learner runs them: posteriors [J, n, C], read back as in training."""
    with tempfile.TemporaryDirectory() as folder:
        store = PosteriorStore(Path(folder, "posteriors"), epoch, CLASSES)
        for peer, (arch, state) in enumerate(states):
            forward = frozen(arch, CLASSES, SHAPE).bind(
                state, precision, inference_batch(epoch.images, epoch.images.device)
            )
            store.run(peer, forward, TEMPERATURE)
        read = [store.batch(range(len(states)), batch).clone() for batch in epoch.batches]
        store.close()
    return torch.cat(read, 1)


def timed(work) -> tuple[float, Tensor]:  # type: ignore[no-untyped-def]
    start = clock()
    result = work()
    return clock() - start, result


def clock() -> float:
    """CPU seconds; with a GPU wall seconds, when all that was asked of it is done."""
    if not torch.cuda.is_initialized():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def flops(epoch: LocalEpoch) -> float:
    """Of all teachers on all images, two for a multiplication and addition."""
    total = 0

    def note(module: nn.Module, _inputs: object, output: Tensor) -> None:
        nonlocal total
        total += 2 * output[0].numel() * module.weight[0].numel()

    for j in range(TEACHERS):
        model = build_model(POOL[j % 3], classes=CLASSES, channels=3)
        initialise(model, 0)
        for module in model.eval().modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_forward_hook(note)
        with torch.no_grad():
            model(torch.zeros(1, *SHAPE))
    return float(total * len(epoch.labels))


def speed_of_mm(precision: torch.dtype, device: torch.device, times: int = 5) -> float:
    """Floating point operations a second of a matrix product, the best of several."""
    size = 8192 if device.type == "cuda" else 2048
    a = torch.randn(size, size, device=device).to(precision)
    return 2 * size**3 / min(timed(lambda: torch.mm(a, a))[0] for _ in range(times))


def load(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [n, 3, 32, 32] and int64 [n]."""
    if path is not None:
        with np.load(path) as file:
            images, labels = file["train_images"][:4000], file["train_labels"][:4000].reshape(-1).astype(np.int64)
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = (digits.images * 15.9).astype(np.uint8)
    return np.repeat(grey.repeat(4, 1).repeat(4, 2)[:, None], 3, 1), digits.target.astype(np.int64)


def epoch_of(images: np.ndarray, labels: np.ndarray, device: torch.device) -> LocalEpoch:
    generator = np.random.default_rng(0)
    return draw_epoch(
        images, labels, batch_size=BATCH, augmentation="none", mean=MEAN, std=STD, generator=generator, device=device
    )


def model_of(arch: str, state: State) -> nn.Module:
    model = build_model(arch, classes=CLASSES, channels=3)
    model.load_state_dict(state)
    return model


def teachers(
    cache: Path, images: np.ndarray, labels: np.ndarray, device: torch.device, arguments: argparse.Namespace
) -> list[tuple[str, State]]:
    """Nine, three of each architecture, each trained on its own draw of at most a third of the first half."""
    cache.mkdir(parents=True, exist_ok=True)
    found = []
    for j in range(TEACHERS):
        arch, path = POOL[j % 3], cache / f"{j}.pt"
        if not path.exists():
            print(f"training teacher {j + 1} of {TEACHERS} ({arch}) …", flush=True)
            half = len(images) // 2
            chosen = np.random.default_rng(j).choice(half, min(half // 3, arguments.own_images), replace=False)
            epoch = epoch_of(images[chosen], labels[chosen], device)
            torch.save(trained(arch, j, epoch, arguments.epochs), path)
        found.append((arch, torch.load(path, weights_only=True)))
    return found


def trained(arch: str, seed: int, epoch: LocalEpoch, epochs: int) -> State:
    model = build_model(arch, classes=CLASSES, channels=3)
    initialise(model, seed)
    model = model.to(epoch.images.device)
    optimizer = Sgd(dict(model.named_parameters()), 0.02, momentum=0.9, weight_decay=5e-4)
    for _ in range(epochs):
        for batch in epoch.batches:
            loss = nn.functional.cross_entropy(model.train()(epoch.pixels(batch)), epoch.labels[batch])
            model.zero_grad()
            loss.backward()
            optimizer.step()
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    main()
