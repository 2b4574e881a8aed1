"""Runs as tasks of a Ray cluster: of the one that ``RAY_ADDRESS`` names, or of one that this command starts here."""

from __future__ import annotations

import ipaddress
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crad_p2p import __version__
from crad_p2p.errors import ConfigurationError, ExitCode
from launch.engines import Job, Need
from launch.engines.node import Report, Seen, blind, look, make_run
from launch.quick import cores
from peer.memory_space import free_memory

_ADDRESS = "RAY_ADDRESS"
#: Of a GPU, or of the machine where this command starts Ray: an estimate is none.
_USABLE = 0.9
_CONNECT_SECONDS = 10
_LOOK_SECONDS = 120
#: Nothing is sent through it but a few words a run; Ray wants this much at least.
_OBJECT_STORE = 80_000_000
#: No message to Ray's makers, and no advice on the terminal.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

#: Of what this process starts; Ray reads it once.
_TOKEN = secrets.token_hex(32)


@dataclass(frozen=True)
class Node:
    """What a node of the cluster has in all.

    Attributes:
        resources: as Ray calls them: ``CPU``, ``GPU``, ``memory`` in bytes.
    """

    id: str
    name: str
    resources: Mapping[str, float]


def compute_on(device: str, nodes: Iterable[Node]) -> str:
    """``cuda`` or ``cpu``: what runs compute on in this cluster.

    Args:
        device: as ``--device`` takes it.

    Raises:
        ConfigurationError: no node has what it takes.
    """
    there = list(nodes)
    if not any(node.resources.get("CPU", 0) >= 1 for node in there):
        raise ConfigurationError("no node of the Ray cluster offers a CPU, and a run takes one; add nodes that do")
    gpus = any(node.resources.get("GPU", 0) > 0 and node.resources.get("CPU", 0) >= 1 for node in there)
    if device == "cuda" and not gpus:
        raise ConfigurationError(
            "--device cuda: no node of the Ray cluster offers a GPU; add one that does, or choose --device cpu"
        )
    return "cuda" if gpus and device != "cpu" else "cpu"


def demand(need: Need, device: str, nodes: Iterable[Node], gpu_bytes: int | None) -> dict[str, float]:
    """What a run asks Ray for, as options of a task.

    Ray would wait for ever for a node with more memory than any has. Nobody else can say whether a run that looks too
    large fits, so it gets a node's whole memory then.

    Args:
        device: ``cuda`` or ``cpu``.
        gpu_bytes: memory of the smallest GPU; None if it is not known, and a run has one for itself then.
    """
    fitting = [
        node.resources.get("memory", 0.0)
        for node in nodes
        if node.resources.get("CPU", 0) >= 1 and (device == "cpu" or node.resources.get("GPU", 0) > 0)
    ]
    asked: dict[str, float] = {"num_cpus": 1, "memory": int(min(need.host, max(fitting)))}
    if device == "cuda":
        share = 1.0 if gpu_bytes is None else need.device / (_USABLE * gpu_bytes)
        asked["num_gpus"] = min(1.0, math.ceil(100 * share) / 100)
    return asked


def check_nodes(seen: Iterable[Seen], token: str, folder: Path) -> None:
    """Raises:
    ConfigurationError: a node does not see what this machine has written into the folder, or has another version.
    """
    for each in seen:
        if each.token != token:
            raise ConfigurationError(blind(each.node, folder))
        if each.version != __version__:
            raise ConfigurationError(
                f"node {each.node} has crad-p2p {each.version}, and this machine {__version__}; install the same "
                f"everywhere"
            )


class RayScheduler:
    """Of the cluster that Ray is connected to.

    Args:
        ray: the package.
        ask_for: options of the task of a run.
        temporary: folder of a Ray that was started for this command; None for another one.
    """

    def __init__(
        self, ray: Any, device: str, ask_for: Callable[[Need], dict[str, float]], temporary: Path | None
    ) -> None:
        self.device = device
        self._ray = ray
        self._ask_for = ask_for
        self._temporary = temporary
        self._given: list[Any] = []

    def submit(self, job: Job) -> Callable[[], Report | None]:
        """See :class:`launch.engines.scheduled.Scheduler`."""
        task = self._ray.remote(make_run).options(name=job.name, max_retries=0, **self._ask_for(job.need))
        running = task.remote(str(job.folder), job.arguments(self.device))
        self._given.append(running)
        return lambda: self._report(running)

    def _report(self, running: Any) -> Report | None:
        if not self._ray.wait([running], timeout=0)[0]:
            return None
        self._given.remove(running)
        try:
            report: Report = self._ray.get(running)
        except self._ray.exceptions.RayError as error:
            return Report("", ExitCode.INCOMPLETE, f"Ray ended it: {_sentence(error)}")
        return report

    def close(self) -> None:
        """See :class:`launch.engines.scheduled.Scheduler`."""
        for running in self._given:
            self._ray.cancel(running, force=True)
        if self._given:
            self._ray.wait(self._given, num_returns=len(self._given), timeout=_CONNECT_SECONDS)
        _leave(self._ray, self._temporary)


def connect(out: Path, device: str) -> tuple[RayScheduler, str]:
    """Join the cluster of ``RAY_ADDRESS``, or start one of this machine, and look whether its nodes can make runs.

    A Ray that is started here ends with this process, listens on the loopback interface, has no dashboard, and takes
    nobody without its token.

    Args:
        out: folder that all nodes must see.
        device: ``auto``, ``cpu`` or ``cuda``.

    Returns:
        The scheduler, and where runs go, for people.

    Raises:
        ConfigurationError: the cluster cannot be reached or used.
    """
    address = os.environ.get(_ADDRESS, "")
    own = address in ("", "local")
    temporary: Path | None = None
    os.environ.update(_QUIET)
    if own:
        # Ray takes the loopback address for its own where it believes that clusters are not supported.
        os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=_TOKEN)
        temporary = Path(tempfile.mkdtemp(prefix="crad-ray-", dir="/tmp"))  # sockets need a short path
    else:
        _check_address(address)
    import ray

    try:
        _init(ray, address, temporary, device)
        if own:
            _check_loopback(ray)
        nodes = [
            Node(each["NodeID"], each["NodeManagerHostname"], each["Resources"])
            for each in ray.nodes()
            if each["Alive"]
        ]
        computed_on = compute_on(device, nodes)
        seen = _look_around(ray, nodes, out)
    except BaseException:
        _leave(ray, temporary)
        raise
    gpu_bytes = min((each.gpu_bytes for each in seen if each.gpu_bytes is not None), default=None)
    where = "started on this machine for this command" if own else f"at {address}"
    count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    words = f"Runs are tasks of Ray, {where}: {count}, {sum(node.resources.get('CPU', 0) for node in nodes):g} CPUs."
    return RayScheduler(ray, computed_on, lambda need: demand(need, computed_on, nodes, gpu_bytes), temporary), words


def _check_address(address: str) -> None:
    """Ray itself tries for minutes, and complains on the terminal meanwhile; so it does with ``auto``, which takes what
    processes and files of this machine look like a cluster, be it somebody else's.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigurationError(
            f"{_ADDRESS} is {address}; expected HOST:PORT of the head of a cluster that this machine belongs to, as "
            f"'ray start' says it"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"{_ADDRESS} is {address}, and nobody answers there ({error}); start the cluster with 'ray start', or "
            f"unset {_ADDRESS} to use this machine alone"
        ) from None


def _init(ray: Any, address: str, temporary: Path | None, device: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    if temporary is None:
        options["address"] = address
    else:
        free = free_memory()
        options |= {
            "address": "local",
            "num_cpus": cores(),
            "num_gpus": 0 if device == "cpu" else None,
            "object_store_memory": _OBJECT_STORE,
            "_memory": None if free is None else int(_USABLE * free),
            "_temp_dir": str(temporary),
        }
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        where, advice = f"the Ray cluster at {address} cannot be used", "see what 'ray status' says of it"
        if temporary is not None:
            where, advice = "Ray cannot be started on this machine", "use --engine local, which needs nothing"
        raise ConfigurationError(f"{where}: {_sentence(error)}; {advice}") from None
    finally:
        for number, handler in before.items():  # Ray puts its own there
            signal.signal(number, handler)


def _check_loopback(ray: Any) -> None:
    """That is by a setting of Ray's that another version may not heed."""
    for each in ray.nodes():
        if not ipaddress.ip_address(each["NodeManagerAddress"]).is_loopback:
            raise ConfigurationError(
                f"Ray {ray.__version__} listens on {each['NodeManagerAddress']} and not on the loopback interface "
                f"alone; use --engine local, or start a cluster yourself and set {_ADDRESS}"
            )


def _look_around(ray: Any, nodes: Sequence[Node], out: Path) -> list[Seen]:
    """Raises:
    ConfigurationError: see :func:`check_nodes`; or a node does not answer.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token = secrets.token_hex(16)
    file = out / f"seen-{token}"
    file.write_text(token)
    seen = []
    try:
        looking = [
            ray.remote(look)
            .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
            .remote(str(file))
            for node in nodes
        ]
        for node, each in zip(nodes, looking, strict=True):
            try:
                seen.append(ray.get(each, timeout=_LOOK_SECONDS))
            except ray.exceptions.RayError as error:
                raise ConfigurationError(
                    f"node {node.name} cannot make runs ({_sentence(error)}); crad-p2p must be installed there, in the "
                    f"same version, for the Python that Ray runs with"
                ) from None
    finally:
        file.unlink(missing_ok=True)
    check_nodes(seen, token, out)
    return seen


def _leave(ray: Any, temporary: Path | None) -> None:
    ray.shutdown()
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _sentence(error: BaseException) -> str:
    """The line that says it: the last one of a traceback of another process, the first one of what Ray says itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if any(line.startswith("Traceback") or ", in " in line for line in lines) else lines[0]
