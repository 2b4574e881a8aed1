"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

#: Its assertions are to say as much as those of tests.
pytest.register_assert_rewrite("processes")

#: A learner for tests that is no test.
collect_ignore = ["light"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Results are bit-identical for equal thread counts only, and the machine's cores are busy enough."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
