"""``crad-peer``: run one peer."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from crad_p2p import __version__
from crad_p2p.commands import interruptible, run_command
from crad_p2p.errors import CradError, UsageError
from crad_p2p.federation import check_address, load_federation
from peer.channels import Waits

app = typer.Typer(add_completion=False)


def _print_version(value: bool) -> None:
    if value:
        print(f"crad-peer {__version__}")
        raise typer.Exit


@app.command()
def peer(
    peer_id: Annotated[int, typer.Option("--id", help="Which peer of the file this is.", envvar="CRAD_ID")],
    peers: Annotated[Path, typer.Option(help="The federation file, alike on every host.", envvar="CRAD_PEERS")],
    listen: Annotated[
        str | None,
        typer.Option(help="HOST:PORT to serve on; by default this peer's address in the file.", envvar="CRAD_LISTEN"),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="Where rounds are kept; by default crad-state/ID here.", envvar="CRAD_STATE_DIR"),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Where the data set's files are; by default the file's folder.", envvar="CRAD_DATA_DIR"),
    ] = None,
    download: Annotated[
        bool,
        typer.Option(
            "--download", help="Fetch the data set's files first if they are missing.", envvar="CRAD_DOWNLOAD"
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(help="auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:1, mps.", envvar="CRAD_DEVICE")
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of the learner; by default torch's choice.", envvar="CRAD_THREADS"),
    ] = None,
    start_wait: Annotated[
        float,
        typer.Option(min=0, help="Seconds until every other peer must have been reached.", envvar="CRAD_START_WAIT"),
    ] = Waits.start,
    linger: Annotated[
        float,
        typer.Option(min=0, help="Seconds to serve on after the last round, for late peers.", envvar="CRAD_LINGER"),
    ] = Waits.linger,
    tls_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where ca.pem, peer.pem and peer.key are; by default crad-tls/ID here.", envvar="CRAD_TLS_DIR"
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Plain text instead of TLS, between addresses of this machine only.",
            envvar="CRAD_INSECURE",
        ),
    ] = False,
    recover: Annotated[
        bool,
        typer.Option("--recover", help="First fetch this peer's last rounds back from the others: its disk lost them."),
    ] = False,
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="One line an event, for people or programs.", envvar="CRAD_LOG_FORMAT"),
    ] = "text",
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Run one peer of a federation: train on the images here, and learn from the other peers' models.

    Stopped in any way, the same command continues after the last finished round.

    Example: crad-peer --id 3 --peers peers.yaml
    """
    del version
    from peer import log
    from peer.host import Host
    from peer.node import Node

    log.configure(log_format, peer_id)
    federation = load_federation(peers, data_dir)
    try:
        listen = check_address(listen or federation.peer(peer_id).address)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    if insecure and tls_dir is not None:
        raise UsageError("--tls-dir and --insecure contradict each other; leave one of them out")
    host = Host(
        peer_id=peer_id,
        peers_file=peers,
        listen=listen,
        state_dir=state_dir or Path("crad-state", str(peer_id)),
        data_dir=data_dir,
        download=download,
        device=device,
        threads=threads,
        tls_dir=None if insecure else tls_dir or Path("crad-tls", str(peer_id)),
        recover=recover,
    )
    try:
        with interruptible("start the same command again to continue"):
            asyncio.run(Node(federation, host, Waits(start=start_wait, linger=linger)).run())
    except CradError as error:
        if log_format == "json":  # for programs, the last word too; people read it below
            logging.getLogger(__name__).error("%s", error, extra={"exit_code": int(error.exit_code)})
        raise


def main() -> None:
    """Console entry point."""
    run_command(app, "crad-peer")
