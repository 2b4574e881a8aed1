"""What belongs to this host and not to the federation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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

    def learner_arguments(self, scratch: Path, count_key: Path | None = None) -> list[str]:
        """The learner's command line.

        Args:
            scratch: a folder that it may make and fill.
            count_key: the file with the secret of the noise on the class counts.
        """
        arguments = ["--id", str(self.peer_id), "--peers", str(self.peers_file), "--device", self.device]
        arguments += ["--precision", self.precision, "--scratch", str(scratch)]
        if count_key is not None:
            arguments += ["--count-key", str(count_key)]
        if self.data_dir is not None:
            arguments += ["--data-dir", str(self.data_dir)]
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
) -> Host:
    """A host from the options of a command; None takes the default.

    Raises:
        UsageError: an option is not what it must be, or contradicts another.
        ConfigurationError: the federation has no such peer.
    """
    try:
        listen = check_address(listen or federation.peer(peer_id, peers_file).address)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    if insecure and tls_dir is not None:
        raise UsageError("--tls-dir and --insecure contradict each other; leave one of them out")
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
    )
