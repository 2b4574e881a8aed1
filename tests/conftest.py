"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

import launch.quick

pytest.register_assert_rewrite("processes")  # its assertions are to say as much as those of tests
from processes import FORK_SERVER, Peer, Peers  # noqa: E402

#: A learner for tests that is no test.
collect_ignore = ["light"]
#: Tests that need both cores, or watch the time: never two of them side by side.
MESHES = ("test_kills.py", "test_network.py", "test_mesh.py", "test_chaos.py", "test_flat.py", "test_hostile.py")


def pytest_configure() -> None:
    """Each of the processes that test side by side gives its meshes ports of its own."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    launch.quick._PORTS = launch.quick._PORTS[mine::count]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that both processes have something to do until the end."""
    items.sort(key=lambda item: item.path.name not in MESHES)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """By file, and all of ``MESHES`` one after the other, as if they were one file."""

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "meshes" if Path(file).name in MESHES else file

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Results are bit-identical for equal thread counts only, and the machine's cores are busy enough."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _end_of_fork_server() -> Iterator[None]:
    yield
    FORK_SERVER.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    """Start peers; all of them have ended after the test."""
    started: list[Peer] = []

    def run(*options: str, state: Path | None = None, **environment: str) -> Peer:
        state = state or tmp_path / "state"
        common = ["--state-dir", str(state), "--device", "cpu", "--threads", "1"]
        started.append(Peer(tmp_path, *options, *common, state=state, **environment))
        return started[-1]

    yield run
    for each in started:
        each.end()


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Nothing but the program itself keeps others from reading its files."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Callable[..., Peers]]:
    """Make federations of real processes, which have all ended after the test."""
    made: list[Peers] = []

    def make(count: int, **settings: Any) -> Peers:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Peers(folder, count, **settings))
        return made[-1]

    yield make
    for each in made:
        each.end()
