"""``crad-peer``: run one peer."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Literal

import typer

from crad_p2p import __version__
from crad_p2p.commands import interruptible, run_command
from crad_p2p.errors import CradError
from crad_p2p.federation import load_federation
from peer import options
from peer.channels import Waits

app = typer.Typer(add_completion=False)


def _print_version(value: bool) -> None:
    if value:
        print(f"crad-peer {__version__}")
        raise typer.Exit


@app.command()
def peer(
    peer_id: options.Id,
    peers: options.PeersFile,
    listen: options.Listen = None,
    state_dir: options.StateDir = None,
    data: options.Data = None,
    data_dir: options.DataDir = None,
    download: options.Download = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    threads: options.Threads = None,
    start_wait: Annotated[
        float,
        typer.Option(min=0, help="Seconds until every other peer must have been reached.", envvar="CRAD_START_WAIT"),
    ] = Waits.start,
    linger: Annotated[
        float,
        typer.Option(min=0, help="Seconds to serve on after the last round, for late peers.", envvar="CRAD_LINGER"),
    ] = Waits.linger,
    tls_dir: options.TlsDir = None,
    insecure: options.Insecure = False,
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
    from peer import heap, log
    from peer.host import make_host
    from peer.node import Node

    heap.tune()
    log.configure(log_format, peer_id)
    federation = load_federation(peers, data_dir)
    host = make_host(
        federation,
        peer_id,
        peers,
        listen=listen,
        state_dir=state_dir,
        data_dir=data_dir,
        download=download,
        device=device,
        precision=precision,
        threads=threads,
        tls_dir=tls_dir,
        insecure=insecure,
        recover=recover,
        data=data,
    )
    heap.settle()
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
