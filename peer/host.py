"""What belongs to this host and not to the federation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from crad_p2p.data.place import absolute_place
from crad_p2p.errors import UsageError
from crad_p2p.federation import Federation, check_address


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
    precision: str
    threads: int | None
    tls_dir: Path | None
    recover: bool = False
    data: str | None = None  # where this peer's own images are, if it has any

    def learner_arguments(self, scratch: Path, count_key: Path | None = None, *, look_only: bool = False) -> list[str]:
        """The learner's command line.

        Args:
            scratch: a folder that it may make and fill.
            count_key: the file with the secret of the noise on the class counts.
            look_only: it must not write anywhere else.
        """
        arguments = ["--id", str(self.peer_id), "--peers", str(self.peers_file), "--device", self.device]
        arguments += ["--precision", self.precision, "--scratch", str(scratch)]
        if count_key is not None:
            arguments += ["--count-key", str(count_key)]
        if self.data_dir is not None:
            arguments += ["--data-dir", str(self.data_dir)]
        if self.data is not None:
            arguments += ["--data", self.data, "--state-dir", str(self.state_dir)]
        if look_only:
            arguments.append("--look-only")
        if self.download:
            arguments.append("--download")
        if self.threads is not None:
            arguments += ["--threads", str(self.threads)]
        return arguments


def make_host(
    federation: Federation,
    peer_id: int,
    peers_file: Path,
    *,
    listen: str | None,
    state_dir: Path | None,
    data_dir: Path | None,
    download: bool,
    device: str,
    precision: str,
    threads: int | None,
    tls_dir: Path | None,
    insecure: bool,
    recover: bool = False,
    data: str | None = None,
) -> Host:
    """A host from the options of a command; None takes the default.

    Raises:
        UsageError: an option is not what it must be, or contradicts another or the federation.
        ConfigurationError: the federation has no such peer, or it is to have its own images and nobody says where.
    """
    try:
        listen = check_address(listen or federation.peer(peer_id, peers_file).address)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    if insecure and tls_dir is not None:
        raise UsageError("--tls-dir and --insecure contradict each other; leave one of them out")
    if data is not None and not federation.data.is_own:
        raise UsageError(
            f"--data {data}: {peers_file} has data.partition.kind {federation.data.partition.kind}, so that all peers "
            f"learn from {federation.data.dataset}; leave --data (CRAD_DATA) out, or set the kind to own"
        )
    try:
        data = None if data is None else absolute_place(data, Path.cwd())
    except ValueError as error:
        raise UsageError(f"--data: {error}") from None
    return Host(
        peer_id=peer_id,
        peers_file=peers_file,
        listen=listen,
        state_dir=state_dir or Path("crad-state", str(peer_id)),
        data_dir=data_dir,
        download=download,
        device=device,
        precision=precision,
        threads=threads,
        tls_dir=None if insecure else tls_dir or Path("crad-tls", str(peer_id)),
        recover=recover,
        data=federation.place_of(peer_id, data) if federation.data.is_own else None,
    )
