"""What all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("processes")  # its assertions are to say as much as those of tests
from processes import Peer, Peers  # noqa: E402

#: A learner for tests that is no test.
collect_ignore = ["light"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Results are bit-identical for equal thread counts only, and the machine's cores are busy enough."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
