"""What belongs to this host and not to the federation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """One peer's place. Without ``tls_dir`` all is sent as plain text."""

    peer_id: int
    peers_file: Path
    listen: str
    state_dir: Path
    data_dir: Path | None
    download: bool
    device: str
    threads: int | None
    tls_dir: Path | None
    recover: bool = False

    def learner_arguments(self, scratch: Path, count_key: Path | None = None) -> list[str]:
        """The learner's command line.

        Args:
            scratch: a folder that it may make and fill.
            count_key: the file with the secret of the noise on the class counts.
        """
        arguments = ["--id", str(self.peer_id), "--peers", str(self.peers_file), "--device", self.device]
        arguments += ["--scratch", str(scratch)]
        if count_key is not None:
            arguments += ["--count-key", str(count_key)]
        if self.data_dir is not None:
            arguments += ["--data-dir", str(self.data_dir)]
        if self.download:
            arguments.append("--download")
        if self.threads is not None:
            arguments += ["--threads", str(self.threads)]
        return arguments
