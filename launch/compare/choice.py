"""The engine that a command asks for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from crad_p2p.errors import UsageError
from launch.engines import Engine

#: Packages that engines need besides crad-p2p; the extra has the engine's name.
_PACKAGES = {"ray": "ray", "slurm": "submitit"}
#: Devices of a node, which its scheduler chooses.
_ANYWHERE = ("auto", "cpu", "cuda")


def check_choice(engine: str, device: str, slurm: Sequence[str]) -> None:
    """Before anything is begun.

    Args:
        engine: ``local``, ``ray`` or ``slurm``.
        slurm: what ``--slurm`` was given.

    Raises:
        UsageError: options do not go together, or a package is missing.
    """
    if slurm and engine != "slurm":
        raise UsageError(f"--slurm {slurm[0]} is for --engine slurm, and the engine is {engine}; leave one out")
    if engine == "local":
        return
    if device not in _ANYWHERE:
        raise UsageError(
            f"--device {device}: with --engine {engine} its scheduler says which device of a node a run gets; "
            f"choose {', '.join(_ANYWHERE)}"
        )
    if engine == "slurm":
        from launch.engines.slurm import settings_of

        settings_of(slurm)
    if find_spec(_PACKAGES[engine]) is None:
        raise UsageError(
            f"--engine {engine} needs the package {_PACKAGES[engine]}, which is missing; pip install "
            f"'crad-p2p[{engine}]', here and on all nodes"
        )


def make_engine(
    engine: str, out: Path, device: str, precision: str, at_once: int | None, slurm: Sequence[str]
) -> tuple[Engine, str]:
    """What :func:`check_choice` has found good; and where runs go, for people, if that is to be said.

    Raises:
        ConfigurationError: device or precision is not there, or the cluster cannot be used.
    """
    if engine == "local":
        from launch.compare.here import machine
        from launch.engines.local import LocalEngine

        return LocalEngine(machine(device, precision), at_once), ""
    import torch

    from crad_p2p.device import resolve_precision
    from launch.engines.scheduled import ScheduledEngine

    if precision != "bfloat16":  # whether that is there is up to the nodes
        resolve_precision(precision, torch.device("cpu"))
    if engine == "ray":
        from launch.engines import ray_cluster

        scheduler, words = ray_cluster.connect(out, device)
        return ScheduledEngine(scheduler, at_once), words
    from launch.engines import slurm as of_slurm

    jobs, words = of_slurm.connect(out, device, of_slurm.settings_of(slurm))
    return ScheduledEngine(jobs, at_once), words
