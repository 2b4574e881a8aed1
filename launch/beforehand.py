"""Whether the data are there and can be cut for all peers, before as many processes find out that they cannot.

The look is taken in a process of its own, so that the images, and what some data sets import, do not stay in this one.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from crad_p2p.errors import CradError, error_of
from crad_p2p.federation import Federation, load_federation
from crad_p2p.parent import end_with_named_parent
from launch.children import environment
from launch.quick import write_federation


def require_data(federation: Federation, data_dir: Path, *, download: bool) -> None:
    """Load the data set as every learner will, and cut it; of own images, see what there is, without reading any.

    Args:
        download: fetch its files first if they are missing.

    Raises:
        CradError: that cannot be done; with the exit code of a peer that fails for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "peers.yaml")
        write_federation(federation, file)
        command = [sys.executable, "-P", "-m", "launch.beforehand", str(file), str(data_dir)]
        ended = subprocess.run(
            [*command, *(["--download"] if download else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # what a download says of its progress goes to stderr
            text=True,
            env=environment(signal.SIGKILL),
            check=False,
        )
    if ended.returncode:
        lines = ended.stdout.strip().splitlines() or ["the look at the data ended without a word"]
        raise error_of(ended.returncode, lines[-1])


def main() -> None:
    """Entry point of that process."""
    end_with_named_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("peers", type=Path)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--download", action="store_true")
    given = parser.parse_args()

    from crad_p2p.data.datasets import load_dataset
    from crad_p2p.data.own.peers import look_at_places
    from crad_p2p.data.partition import make_splits

    federation = load_federation(given.peers)
    try:
        if federation.data.is_own:
            look_at_places(federation)
            return
        data = load_dataset(federation.data, seed=federation.seed, data_dir=given.data_dir, download=given.download)
        make_splits(data.train.labels, federation.data, federation.ids, federation.seed, data.train.groups)
    except CradError as error:
        print(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
