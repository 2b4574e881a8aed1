"""The images of a whole federation that is simulated on this machine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from crad_p2p.data.datasets import Dataset, load_dataset
from crad_p2p.data.own.peers import all_sites
from crad_p2p.data.shards import Shard
from crad_p2p.federation import Federation


def load_images(
    console: Console, federation: Federation, out: Path, *, data_dir: Path, download: bool
) -> Dataset | Mapping[int, Shard]:
    """The common data set, or what each peer has of its own.

    Args:
        out: DIR; the caches and summaries of own images are in DIR/images.

    Raises:
        CradError: they cannot be had.
    """
    if not federation.data.is_own:
        return load_dataset(federation.data, seed=federation.seed, data_dir=data_dir, download=download)
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with console.status("Reading the images of all peers …"):
        return all_sites(federation, out / "images", say)
