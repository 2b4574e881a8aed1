"""What runs take of the memory, estimated before they begin, and what this machine has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from crad_p2p.data.datasets import Dataset, load_dataset
from crad_p2p.federation import Federation
from launch.compare.plan import Planned
from launch.engines import Need
from launch.engines.local import Device, Machine
from launch.quick import cores
from peer.memory_space import free_memory

#: Of a process that has imported torch and the rest, as measured on Linux, and of a CUDA context.
_PROCESS, _CONTEXT = 620_000_000, 600_000_000


def need_of(federation: Federation, whole: Dataset) -> Need:
    """The most that a simulation holds at a time.

    Every client has a model, its momentum and its gradients; of every client there are the snapshot that teaches, the
    new one and that of the best round, with what goes beside them: the models, if they stay at home. One trains at a
    time, with the largest batch, beside one teacher. On a GPU every client has the test set and its shard there.

    Args:
        whole: the data set of its file, of which the run may take a part.
    """
    from crad_p2p.architectures import layout_of
    from crad_p2p.footprint import kept_by_step

    all_images, test = whole.train.images.nbytes + whole.test.images.nbytes, whole.test.images.nbytes
    count = min(federation.data.samples or len(whole.train), len(whole.train))
    train = whole.train.images[0].nbytes * count
    shape = whole.train.images.shape[1:]
    classes = len(whole.class_names)
    archs = [federation.peer(peer).arch for peer in federation.ids]
    sizes = {
        arch: sum(spec.nbytes for spec in layout_of(arch, classes=classes, channels=shape[0]).values())
        for arch in set(archs)
    }
    batch = max(kept_by_step(federation, arch, classes=classes, image_shape=shape) for arch in sizes)
    peaks = 4 if federation.method.traits.has_peak else 0  # the peak model, and one beside each snapshot
    models = sum(sizes[arch] for arch in archs)
    # Where predictions are published, three of every peer, and those of all as one peer learns from them. A transfer
    # set is with every peer, and beside its snapshots if it was made.
    said = 4 * federation.transfer_size * classes * len(archs)
    copies = 1 if federation.method.making is None else 5
    common = 6 * said + copies * federation.transfer_size * whole.train.images[0].nbytes * len(archs)
    step = 2 * batch + 3 * max(sizes.values())  # convolutions take about as much again for themselves
    # Where one trains for all: their models as they came, in training, and in three files.
    together = 8 * models if federation.method.aggregates else 0
    host = _PROCESS + all_images + 2 * train + (6 + peaks) * models + common + together + step
    on_device = train + len(archs) * test
    return Need(host, _CONTEXT + (3 + peaks) * models + step + on_device)


def needs(plan: Iterable[Planned], data_dir: Path, download: bool) -> dict[str, Need]:
    """Of every run, by name. Every data set is read once, so that one that cannot be used is known before a run begins.

    Raises:
        DataError: so it is.
    """
    found: dict[str, Need] = {}
    of_dataset: dict[tuple[str, str | None], list[Planned]] = {}
    for planned in plan:
        data = planned.federation.data
        of_dataset.setdefault((data.dataset, data.partition.by), []).append(planned)
    for several in of_dataset.values():
        whole = several[0].federation.data.model_copy(update={"samples": None})
        images = load_dataset(whole, seed=several[0].seed, data_dir=data_dir, download=download)
        estimated: dict[tuple[str, int], Need] = {}
        for planned in several:
            key = (planned.method, planned.peers)
            if key not in estimated:
                estimated[key] = need_of(planned.federation, images)
            found[planned.name] = estimated[key]
    return found


def machine(device: str, precision: str) -> Machine:
    """What runs can use: all GPUs with ``auto`` and ``cuda``.

    Raises:
        ConfigurationError: device or precision is not there.
    """
    import torch

    from crad_p2p.device import memory_of, resolve_device, resolve_precision

    first = resolve_device(device)
    resolve_precision(precision, first)
    names = [str(first)]
    if first.type == "cuda" and first.index is None:
        names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    devices = []
    for name in names:
        free = memory_of(torch.device(name))
        devices.append(Device(name, None if free is None else free[0]))
    return Machine(cores(), free_memory(), tuple(devices))
