"""Options of the commands that concern one peer on its host; each is also a ``CRAD_…`` variable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from crad_p2p.errors import UsageError


def require_device(name: str) -> str:
    """See that it is the name of a device; whether it is there is known where torch is.

    Raises:
        UsageError: it is not.
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise UsageError(f"--device {name}: there is no such kind of device; use auto, cpu, cuda, cuda:1 or mps")
    return name


def require_precision(name: str) -> str:
    """Likewise for ``--precision``.

    Raises:
        UsageError: it is none.
    """
    if name not in ("auto", "float32", "bfloat16"):
        raise UsageError(f"--precision {name}: use auto, float32 or bfloat16")
    return name


Id = Annotated[int, typer.Option("--id", help="Which peer of the file this is.", envvar="CRAD_ID")]
PeersFile = Annotated[
    Path, typer.Option("--peers", help="The federation file, alike on every host.", envvar="CRAD_PEERS")
]
Listen = Annotated[
    str | None,
    typer.Option(help="HOST:PORT to serve on; by default this peer's address in the file.", envvar="CRAD_LISTEN"),
]
StateDir = Annotated[
    Path | None,
    typer.Option(help="Where rounds are kept; by default crad-state/ID here.", envvar="CRAD_STATE_DIR"),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the data set's files are; by default the file's folder.", envvar="CRAD_DATA_DIR"),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Where this peer's own images are: folder:PATH (one directory a class), csv:PATH, npz:PATH; for "
        "federations with data.partition.kind own.",
        envvar="CRAD_DATA",
    ),
]
Download = Annotated[
    bool,
    typer.Option("--download", help="Fetch the data set's files first if they are missing.", envvar="CRAD_DOWNLOAD"),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:1, mps.", envvar="CRAD_DEVICE", callback=require_device
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        help="In what teachers compute: auto (bfloat16 where the hardware gains by it), float32, bfloat16.",
        envvar="CRAD_PRECISION",
        callback=require_precision,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads of the learner; by default torch's choice.", envvar="CRAD_THREADS"),
]
TlsDir = Annotated[
    Path | None,
    typer.Option(help="Where ca.pem, peer.pem and peer.key are; by default crad-tls/ID here.", envvar="CRAD_TLS_DIR"),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Plain text instead of TLS, between addresses of this machine only.", envvar="CRAD_INSECURE"
    ),
]
