"""What all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from processes import Peers

#: Its assertions are to say as much as those of tests.
pytest.register_assert_rewrite("processes")

#: A learner for tests that is no test.
collect_ignore = ["light"]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Callable[..., Peers]]:
    """Make federations of real processes, which have all ended after the test."""
    from processes import Peers

    made: list[Peers] = []

    def make(count: int, **settings: Any) -> Peers:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Peers(folder, count, **settings))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Results are bit-identical for equal thread counts only, and the machine's cores are busy enough."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
