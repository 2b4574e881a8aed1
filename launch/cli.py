"""``crad-mesh``: what concerns several peers at once."""

from __future__ import annotations

import asyncio
import copy
import functools
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer
import yaml
from rich.console import Console
from typer.models import OptionInfo

from crad_p2p import __version__
from crad_p2p.commands import interruptible, run_command
from crad_p2p.errors import (
    ConfigurationError,
    CradError,
    ExitCode,
    IncompleteError,
    PeersDisagreeError,
    ReservationsError,
    UsageError,
)
from crad_p2p.federation import Federation, build_federation, describe_difference, load_federation, read_fields
from crad_p2p.lines import say
from crad_p2p.methods.catalogue import METHODS
from crad_p2p.results import RoundRecord, Summary
from launch import certs, template
from launch.beforehand import require_data
from launch.children import environment
from launch.collect import collect, write_results
from launch.computing import Computing
from launch.kept import keep_models, require_place
from launch.mesh import Mesh, peer_dir
from launch.quick import (
    Quick,
    cores,
    data_directory,
    default_threads,
    free_addresses,
    resolve,
    split_dataset,
    write_federation,
)
from launch.view import Progress, result_table
from peer import options
from peer.lock import Lock
from peer.store import Store

if TYPE_CHECKING:
    from launch.compare.plan import Planned
    from launch.compare.session import Session
    from launch.engines import Engine

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run, simulate and set up federations of crad-peer processes.",
)
app.add_typer(certs.app, name="certs")

_QUICK = "Quick settings, instead of --peers"
PeersFile = Annotated[Path | None, typer.Option(help="A whole federation file, as 'crad-mesh init' writes.")]
Count = Annotated[int | None, typer.Option(min=1, help="Number of peers (10).", rich_help_panel=_QUICK)]
_DATASET = "digits, cifar10, pathmnist, npz:PATH, or npz:PATH@BY for shards of whole groups (patients), …"
Dataset = Annotated[str | None, typer.Option(help=_DATASET, rich_help_panel=_QUICK)]
Alpha = Annotated[
    float | None, typer.Option(help="Dirichlet concentration (digits: 1, else 0.3).", rich_help_panel=_QUICK)
]
Rounds = Annotated[int | None, typer.Option(help="Rounds R (digits: 50, else 300).", rich_help_panel=_QUICK)]
Method = Annotated[str | None, typer.Option(help=f"{', '.join(METHODS)} (crad).", rich_help_panel=_QUICK)]
Seed = Annotated[int | None, typer.Option(help="Seed of all random draws (1024).", rich_help_panel=_QUICK)]
Pool = Annotated[
    str | None,
    typer.Option(help="Architectures, comma-separated; peer i has number i mod length.", rich_help_panel=_QUICK),
]
Samples = Annotated[int | None, typer.Option(help="At most so many training images in all.", rich_help_panel=_QUICK)]
Transfer = Annotated[
    int | None,
    typer.Option(
        "--transfer-samples",
        help="Cut so many training images out for all before the shards; fedmd and msfkd need them (none).",
        rich_help_panel=_QUICK,
    ),
]
Participation = Annotated[
    int | None, typer.Option(help="Peers that take part in a round, drawn anew each (all).", rich_help_panel=_QUICK)
]


def _of_all_runs(option: object) -> OptionInfo:
    """The same option for compare, which makes many federations and has no --peers."""
    moved: OptionInfo = copy.copy(get_args(option)[1])
    moved.rich_help_panel = "Settings of all runs"
    return moved


Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of each learner (cores / peers).")]
Device = Annotated[
    str,
    typer.Option(help="auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:1, mps.", callback=options.require_device),
]
Precision = Annotated[
    str,
    typer.Option(
        help="In what teachers compute: auto (bfloat16 where that is faster), float32, bfloat16.",
        callback=options.require_precision,
    ),
]
KeepModels = Annotated[
    bool, typer.Option("--keep-models", help="Keep all peers' last models, in models/; 'explain' reads them.")
]
DataDir = Annotated[Path | None, typer.Option(help="Where the data set's files are.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the data set's files first if they are missing.")]


def _print_version(value: bool) -> None:
    if value:
        print(f"crad-mesh {__version__}")
        raise typer.Exit


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False) -> None:
    del version


@app.command()
def up(
    peers: PeersFile = None,
    count: Count = None,
    dataset: Dataset = None,
    alpha: Alpha = None,
    rounds: Rounds = None,
    method: Method = None,
    seed: Seed = None,
    pool: Pool = None,
    samples: Samples = None,
    transfer_samples: Transfer = None,
    participation: Participation = None,
    threads: Threads = None,
    device: Device = "auto",
    precision: Precision = "auto",
    data_dir: DataDir = None,
    download: Download = False,
    alone: Annotated[
        bool | None,
        typer.Option(
            help="Afterwards run the same peers learning alone, for comparison; by default without --peers only."
        ),
    ] = None,
    recover: Annotated[
        bool, typer.Option("--recover", help="First let peers that lost their disk fetch their last rounds back.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("crad-run"),
) -> None:
    """Run a whole federation on this machine: one real crad-peer process for every peer.

    Without any option it is a demonstration on scikit-learn's digits. Run again with the same options, it continues.

    Example: crad-mesh up --dataset cifar10 --data-dir data --samples 4000 --rounds 30 --pool resnet18@0.25,cnn6@0.25
    """
    console = Console(emoji=False)
    quick = Quick(count, dataset, alpha, rounds, method, seed, pool, samples, participation, transfer_samples)
    federation = resolve(peers, quick, data_dir)
    data_dir = data_directory(peers, data_dir)
    out = out.resolve()
    if download or not (out / "peers.yaml").exists():  # a run that goes on has been through this
        require_data(federation, data_dir, download=download)
    _make_directory(out)
    lock = Lock(out / "lock")
    lock.take(f"a mesh is already running in {out}", "wait for it, stop it, or choose another --out")
    _adopt(federation, peers, out)
    threads = threads or default_threads(len(federation.peers))
    computing = Computing(threads, device, precision, data_dir)
    with_alone = (peers is None if alone is None else alone) and federation.method.name != "local"
    finished = _finished(out, federation, "grpc")
    if finished is None or recover:
        _announce(console, federation, out, threads)
        finished = _run_mesh(console, federation, out, computing, recover)
    else:
        console.print(f"{out} holds the complete run of this federation; for another one choose another --out.")
    with interruptible(f"the same command runs the comparison again (--out {out})"):
        beside = _run_alone(console, federation, out, computing) if with_alone else None
    _show(console, finished, beside, out / "summary.json")
    _say_reservations(finished, out)


@app.command()
def simulate(
    peers: PeersFile = None,
    count: Count = None,
    dataset: Dataset = None,
    alpha: Alpha = None,
    rounds: Rounds = None,
    method: Method = None,
    seed: Seed = None,
    pool: Pool = None,
    samples: Samples = None,
    transfer_samples: Transfer = None,
    participation: Participation = None,
    threads: Threads = None,
    device: Device = "auto",
    precision: Precision = "auto",
    data_dir: DataDir = None,
    download: Download = False,
    keep: KeepModels = False,
    out: Annotated[Path, typer.Option(help="Where the results are written.")] = Path("crad-simulation"),
) -> None:
    """Run the same rounds in this one process, without network.

    With the same --threads on the same machine, the snapshots are those of 'up', byte for byte.

    Example: crad-mesh simulate --rounds 10 --out simulation
    """
    import torch

    from crad_p2p.device import resolve_device, resolve_precision
    from crad_p2p.simulation import Published
    from crad_p2p.simulation import simulate as run
    from launch.images import load_images

    console = Console(emoji=False)
    quick = Quick(count, dataset, alpha, rounds, method, seed, pool, samples, participation, transfer_samples)
    federation = resolve(peers, quick, data_dir)
    data_dir = data_directory(peers, data_dir)
    out = out.resolve()
    if (out / "peers").exists():
        raise UsageError(f"--out {out} holds a run of 'crad-mesh up'; choose another directory for the simulation")
    _make_directory(out)
    if keep:
        require_place(out)
    last: list[Published] = []
    threads = threads or default_threads(len(federation.peers))
    torch.set_num_threads(threads)
    images = load_images(console, federation, out, data_dir=data_dir, download=download)
    on = resolve_device(device)
    with interruptible("a simulation starts from the beginning"), Progress(console, federation) as progress:
        summary, history = run(
            federation,
            images,
            device=on,
            precision=resolve_precision(precision, on),
            threads=threads,
            workers=max(1, cores() // threads),
            on_round=lambda _number, records: progress.show_records(records),
            on_end=last.extend if keep else lambda _published: None,
        )
    path = write_results(out, summary, history)
    if keep:
        keep_models(out, federation, last)
    _show(console, summary, None, path)
    if quarantined := sorted({peer for result in summary.peers for peer in result.quarantined_teachers}):
        raise ReservationsError(
            f"all {summary.rounds} rounds are done, with reservations: some were made without snapshots of peer"
            f"{'s' if len(quarantined) > 1 else ''} {', '.join(map(str, quarantined))}, which were refused; {path} "
            f"says why (quarantine_reasons)"
        )


@app.command("compare")
def compare_methods(
    methods: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(METHODS)}.")] = "crad,uniform,local",
    dataset: Annotated[
        list[str] | None,
        typer.Option(help=f"{_DATASET}; may be given several times (digits)."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2,3",
    count: Annotated[str | None, typer.Option(help="Numbers of peers, comma-separated (10).")] = None,
    participation: Annotated[int | None, _of_all_runs(Participation)] = None,
    rounds: Annotated[int | None, _of_all_runs(Rounds)] = None,
    alpha: Annotated[float | None, _of_all_runs(Alpha)] = None,
    pool: Annotated[str | None, _of_all_runs(Pool)] = None,
    samples: Annotated[int | None, _of_all_runs(Samples)] = None,
    transfer_samples: Annotated[int | None, _of_all_runs(Transfer)] = None,
    settings: Annotated[
        Path | None,
        typer.Option(help="A YAML file with further fields of a federation file, for all runs: docs/compare.md."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time, at most (as many as there is room for).")
    ] = None,
    engine: Annotated[
        Literal["local", "ray", "slurm"],
        typer.Option(help="Where runs are made: by this machine, or by the nodes of a cluster: docs/compare.md."),
    ] = "local",
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm",
            metavar="KEY=VALUE",
            help="With --engine slurm: an option of sbatch, as partition=short; may be given several times.",
        ),
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    data_dir: DataDir = None,
    download: Download = False,
    keep: KeepModels = False,
    out: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("crad-comparison"),
) -> None:
    """Simulate every method on every data set with every seed and number of peers, and make tables and figures of it.

    All methods have the same shards, schedule and seeds. Finished runs are not
    made again: the same command continues, and one with more methods or seeds
    adds to them.

    Example: crad-mesh compare --methods crad,uniform,local --dataset npz:a.npz --seeds 1,2,3 --rounds 30 --samples 4000
    """
    from launch.compare.choice import check_choice, make_engine
    from launch.compare.plan import make_plan, numbers
    from launch.compare.session import Session, find_finished, name_without_models
    from launch.compare.view import accuracy_table, announce

    check_choice(engine, device, slurm or [])
    console = Console(emoji=False)
    plan = make_plan(
        methods=methods.split(","),
        datasets=dataset or ["digits"],
        seeds=numbers(seeds, "--seeds"),
        counts=[None] if count is None else numbers(count, "--count"),
        common=Quick(
            alpha=alpha,
            rounds=rounds,
            pool=pool,
            samples=samples,
            participation=participation,
            transfer_samples=transfer_samples,
        ),
        settings=None if settings is None else read_fields(settings),
        source=str(settings),
    )
    out = out.resolve()
    _make_directory(out)
    lock = Lock(out / "lock")
    lock.take(f"a comparison is already running in {out}", "wait for it, stop it, or choose another --out")
    found = find_finished(plan, out)
    announce(console, plan, len(found), str(out))
    if keep and (names := name_without_models(found.values(), out)):
        console.print(names, soft_wrap=True, highlight=False, markup=False)
    session = Session(plan, found, out, shlex.join(["crad-mesh", *sys.argv[1:]]))
    with interruptible(f"the same command makes the runs that are missing (--out {out})"):
        missing = [planned for planned in plan if planned.name not in found]
        if missing:
            _make_runs(
                session,
                missing,
                out,
                console,
                Computing(1, device, precision, data_directory(None, data_dir)),
                download,
                keep,
                functools.partial(make_engine, engine, out, device, precision, jobs, slurm or []),
            )
        if session.outcomes():
            session.write_tables()
            console.print(accuracy_table(session.outcomes(), len({planned.seed for planned in plan})))
            for line in (f"Tables: {out / 'results.md'}", session.draw()):
                console.print(line, soft_wrap=True, highlight=False, markup=False)
    session.complain()


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("peers.yaml"),
    count: Annotated[int, typer.Option(min=1, help="Number of peers.")] = 10,
    dataset: Annotated[str | None, typer.Option(help=f"{_DATASET} (digits).")] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Every site brings its own images: names of all classes, comma-separated. Then no --dataset."
        ),
    ] = None,
) -> None:
    """Write a commented federation file to start from.

    Example: crad-mesh init peers.yaml --count 3 --classes adenoma,normal,polyp
    """
    if path.exists():
        raise UsageError(f"{path} exists already; give another name, or remove it first")
    if classes is not None and dataset is not None:
        raise UsageError(
            f"--classes {classes} and --dataset {dataset} contradict each other: sites have images of their own, or a "
            f"common data set; leave one of them out"
        )
    names = None if classes is None else [name.strip() for name in classes.split(",")]
    text = template.render(count, *split_dataset(dataset or "digits"), names)
    build_federation(yaml.safe_load(text), "the new file")
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
    say(f"{path} is written. Next:")
    say("  1. set name and addresses in it, and give the same file to every host")
    say("  2. make certificates, as docs/certificates.md says, beginning with")
    say("     crad-mesh certs init-ca --federation NAME")
    say(f"     crad-mesh certs request --id 0 --peers {path}")
    say("  3. look on every host for what would stand in the way, and start its peer:")
    place = "" if classes is None else " --data folder:IMAGES"
    say(f"     crad-mesh check --id 0 --peers {path}{place}")
    say(f"     crad-peer --id 0 --peers {path}{place}")


@app.command()
def check(
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
    tls_dir: options.TlsDir = None,
    insecure: options.Insecure = False,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds for which the others are called, and their calls waited for.")
    ] = 10.0,
) -> None:
    """See on this host what would keep its peer from taking part. Takes the options of crad-peer.

    Certificate, address, data, memory, disk, and all other peers that run
    or are checked at the same time: do both reach one another, and run the
    same? A peer that runs is not disturbed.

    Example: crad-mesh check --id 3 --peers peers.yaml
    """
    from launch.check import run_check
    from peer.host import make_host

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
        data=data,
    )
    with interruptible("check again when you like; nothing was changed"):
        code = run_check(Console(emoji=False), federation, host, wait)
    if code:
        raise typer.Exit(code)


@app.command()
def chaos(
    count: Annotated[int, typer.Option(min=2, help="Number of peers.")] = 5,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds R.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Of the faults and of the federation.")] = 0,
    policy: Annotated[Literal["all", "quorum"], typer.Option(help="When a round opens.")] = "all",
    faults: Annotated[int, typer.Option(min=1, help="Number of faults; about 24 come in a minute.")] = 24,
    out: Annotated[Path, typer.Option(help="A new directory for everything.")] = Path("crad-chaos"),
) -> None:
    """Kill, stop and cut off real peers at random, mend everything, and check what all of them have written.

    Under policy all every round must have the bytes of an undisturbed run. The
    same seed gives the same faults in the same order again; how far the rounds
    are when each comes depends on the machine.

    Example: crad-mesh chaos --count 5 --seed 7 --out chaos-7
    """
    console = Console(emoji=False)
    out = out.resolve()
    _make_directory(out)
    if any(out.iterdir()):
        raise UsageError(f"--out {out} is not empty; choose a new directory, so that only this run is checked")
    federation = build_federation(
        {
            "federation": "chaos",
            "seed": seed,
            "rounds": rounds,
            "data": {"dataset": "digits", "samples": 200 * count, "partition": {"alpha": 1.0}},
            "barrier": {"policy": policy, **({"grace": 2.0} if policy == "quorum" else {})},
            "peers": [
                {"id": i, "address": address, "arch": ("resnet18@0.125", "cnn6@0.125")[i % 2]}
                for i, address in enumerate(free_addresses(count))
            ],
        },
        "the command line",
    )
    console.print(f"{count} peers, {rounds} rounds, policy {policy}, faults of seed {seed}; everything in {out}")
    with interruptible(f"choose another --out for the next run; what there is of this one is in {out}"):
        _chaos(console, federation, out, seed, faults)


@app.command("replay")
def replay_events(
    path: Annotated[Path, typer.Argument(help="A peer's state directory, or its events.jsonl.")],
    last: Annotated[int | None, typer.Option(min=1, help="Show only so many of the last events.")] = None,
) -> None:
    """Show what a peer's barrier took in and decided, and check that the same events give the same decisions again.

    Example: crad-mesh replay crad-run/peers/3 --last 50
    """
    from launch.postmortem import show

    show(Console(emoji=False), path, last)


@app.command("audit")
def audit_lineage(
    directory: Annotated[Path, typer.Argument(help="A peer's state directory, or the --out directory of 'up'.")],
    ca: Annotated[
        Path | None,
        typer.Option(help="CA certificates that are trusted; for a directory of 'up' its tls/ca.pem unless given."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A snapshot file or its sha256: show also from what this model descends.")
    ] = None,
) -> None:
    """Verify the lineage of every model from the signed manifests alone: who published it, and who taught it.

    Needs neither network nor models, and ends with 12 if something is wrong or
    missing. The dates of certificates are not looked at: a signature stays good
    when its certificate has expired.

    Example: crad-mesh audit crad-state/3 --ca ca.pem
    """
    from launch.audit import show

    show(Console(emoji=False), directory, ca, model)


@app.command("explain")
def explain_target(
    image: Annotated[
        str, typer.Argument(help="Number of an image of the common test set, or a PNG or JPEG file like them.")
    ],
    run: Annotated[
        Path, typer.Option(help="The --out directory of 'up' or of 'simulate --keep-models', or a run of 'compare'.")
    ],
    student: Annotated[int | None, typer.Option(help="The peer whose target it is (the first).")] = None,
    figure: Annotated[Path | None, typer.Option(help="Also draw it, as SVG; needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all classes, for programs.")] = False,
    data_dir: DataDir = None,
    download: Download = False,
) -> None:
    """Show for one image which teachers were dropped, why, and with what weight each other one counted.

    The models are those of the last round of which all peers have one.

    Example: crad-mesh explain 5 --run crad-run --figure five.svg
    """
    from launch.explain.command import show

    with interruptible("start it again when you like; nothing was changed"):
        show(
            Console(emoji=False),
            image,
            run,
            student=student,
            figure=figure,
            as_json=as_json,
            data_dir=data_dir,
            download=download,
        )


def main() -> None:
    """Console entry point."""
    run_command(app, "crad-mesh")


# --- steps of compare -------------------------------------------------------------------------------------------------


def _make_runs(
    session: Session,
    missing: Sequence[Planned],
    out: Path,
    console: Console,
    computing: Computing,
    download: bool,
    keep: bool,
    make_engine: Callable[[], tuple[Engine, str]],
) -> None:
    """Make runs by an engine, which nothing is begun for before the data are known to be good."""
    from launch.compare.here import needs
    from launch.compare.session import prepare
    from launch.engines import Job

    need = needs(missing, computing.data_dir, download)
    engine, where = make_engine()
    if where:
        console.print(where, highlight=False, soft_wrap=True, markup=False)
    jobs = [
        Job(each.name, prepare(each, out), computing.data_dir, computing.precision, need[each.name], keep)
        for each in missing
    ]
    session.make(jobs, engine, console)


# --- steps of up ------------------------------------------------------------------------------------------------------


def _adopt(federation: Federation, peers: Path | None, out: Path) -> None:
    """Write the federation file to ``out``, if the run that may be there already is of the same federation."""
    path = out / "peers.yaml"
    if peers is not None and peers.resolve() == path:
        raise UsageError(f"--out {out} is where {peers} lies, which would be overwritten; choose another --out")
    if path.exists():
        there = load_federation(path)
        difference = describe_difference(
            {**there.agreed(), **there.places()},
            {**federation.agreed(), **federation.places()},
            "that run",
            "this command",
        )
        started = any((peer_dir(out, peer) / "rounds").glob("[0-9]*") for peer in there.ids)
        if difference and started:
            raise ConfigurationError(f"{out} holds a run with other settings: {difference}; choose another --out")
        if difference:  # it failed before its first round: nothing to keep
            for peer in there.ids:
                shutil.rmtree(peer_dir(out, peer), ignore_errors=True)
    write_federation(federation, path)


def _make_directory(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror}); choose another directory") from None


def _finished(out: Path, federation: Federation, transport: str) -> Summary | None:
    """The result that is there already, if it is complete and of this federation."""
    try:
        summary = Summary.read(out / "summary.json")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"{out / 'summary.json'} is damaged; remove it, or choose another --out") from None
    same = (summary.config_digest, summary.transport) == (federation.digest(), transport)
    if not same:
        raise ConfigurationError(f"{out} holds the results of another run; choose another --out")
    return summary if summary.complete else None


def _announce(console: Console, federation: Federation, out: Path, threads: int) -> None:
    data, method = federation.data, federation.method
    rounds = f"{federation.rounds} round{'s' if federation.rounds > 1 else ''}"
    shards = f"Shards: {data.partition.describe()}, seed {federation.seed}. "
    if data.is_own:
        shards = f"{len(data.classes or ())} classes, each peer's images are its own. "
    console.print(
        f"{_peers(federation)} {data.words} by {method.name} for {rounds}, each a process of its own "
        f"with {threads} CPU thread{'s' if threads > 1 else ''}.\n"
        f"{shards}"
        f"Architectures: {', '.join(dict.fromkeys(peer.arch for peer in federation.peers))}.\n"
        f"Everything is written to {out}; Ctrl-C stops, the same command continues.",
        highlight=False,
    )


def _peers(federation: Federation) -> str:
    return "1 peer learns" if len(federation.peers) == 1 else f"{len(federation.peers)} peers learn"


def _run_mesh(console: Console, federation: Federation, out: Path, computing: Computing, recover: bool) -> Summary:
    start = time.monotonic()
    try:
        with Progress(console, federation) as progress:
            mesh = Mesh(
                federation,
                out / "peers.yaml",
                out,
                computing=computing,
                recover=recover,
                progress=progress,
            )
            asyncio.run(mesh.run())
    except CradError:
        with suppress(OSError, CradError):  # that error says more than that its results cannot be written
            write_results(out, *collect(federation, out, time.monotonic() - start))
        raise
    summary, history = collect(federation, out, time.monotonic() - start)
    write_results(out, summary, history)
    for peer, words in {**mesh.reservations, **mesh.failed}.items():
        console.print(f"peer {peer}: {words}", highlight=False)
    return summary


def _run_alone(console: Console, federation: Federation, out: Path, computing: Computing) -> Summary | None:
    """The same peers, split and schedule with method ``local``, as a simulation in a process of its own."""
    folder = out / "alone"
    _make_directory(folder)
    local = federation.model_copy(update={"method": federation.method.model_copy(update={"name": "local"})})
    if (finished := _finished(folder, local, "memory")) is not None:
        return finished
    with console.status("For comparison: the same peers learning alone …"):
        _simulate(local, folder, computing.arguments())
    return Summary.read(folder / "summary.json")


def _simulate(federation: Federation, folder: Path, options: Sequence[str]) -> None:
    """Run a simulation in a process of its own, which ends with this one.

    Raises:
        CradError: it failed.
    """
    write_federation(federation, folder / "peers.yaml")
    command = [sys.executable, "-P", "-m", "launch", "simulate", "--peers", str(folder / "peers.yaml")]
    with subprocess.Popen(
        [*command, "--out", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(signal.SIGKILL),
    ) as process:
        try:
            said, _ = process.communicate()
        finally:  # also when interrupted
            process.kill()
            process.wait()
    if process.returncode != ExitCode.COMPLETE:
        lines = said.strip().splitlines() or [f"it ended with {process.returncode}, without a word"]
        raise CradError(f"the simulation in {folder} failed: {lines[-1]}")


def _say_reservations(summary: Summary, out: Path) -> None:
    """End with exit code 11 if some round was made without a peer.

    Raises:
        ReservationsError: so it was, or a peer has evidence against another.
    """
    unfinished = [peer.id for peer in summary.peers if peer.rounds_completed < summary.rounds]
    if unfinished:
        raise ReservationsError(
            f"all {summary.rounds} rounds are done, but not by peer{'s' if len(unfinished) > 1 else ''} "
            f"{', '.join(map(str, unfinished))}: mend what is said above and run the same command again, or see "
            f"{out / 'summary.json'}"
        )
    away = any(
        peer.missing_teachers or peer.stale_teachers or peer.skipped_rounds or peer.quarantined_teachers
        for peer in summary.peers
    )
    if away or any(Store(peer_dir(out, peer.id)).conflicts() for peer in summary.peers):
        raise ReservationsError(
            f"all {summary.rounds} rounds are done, with reservations: some were made without a peer or its snapshot, "
            f"or there is evidence against one; {out / 'summary.json'} names them"
        )


def _undisturbed(console: Console, federation: Federation, out: Path) -> list[RoundRecord]:
    """History of the same federation where nothing goes wrong, from a simulation in a process of its own."""
    folder = out / "undisturbed"
    _make_directory(folder)
    with console.status("The same run undisturbed, to compare with …"):
        _simulate(federation, folder, ["--threads", "1", "--device", "cpu"])
    return [RoundRecord.from_line(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def _chaos(console: Console, federation: Federation, out: Path, seed: int, faults: int) -> None:
    """The run, and what is to be said of it.

    Raises:
        PeersDisagreeError: something is wrong.
        IncompleteError: the peers did not finish, or not enough was tried.
    """
    from launch.chaos import Chaos, span
    from launch.checker import check

    reference = _undisturbed(console, federation, out) if federation.barrier.policy == "all" else None
    note = functools.partial(console.print, highlight=False, soft_wrap=True)
    run = Chaos(federation, out, seed=seed, faults=faults, note=note)
    start = time.monotonic()
    report = asyncio.run(run.run())
    write_results(out, *collect(federation, out, time.monotonic() - start))
    stores = {peer: Store(peer_dir(out, peer)) for peer in federation.ids}
    wrong = [*report.deaths, *check(federation, stores, reference)]
    kinds = ", ".join(f"{number} {kind}s" for kind, number in sorted(report.faults.items())) or "none"
    kinds += f", and {report.missed} that found no process" if report.missed else ""
    if report.reached:
        first, last = min(report.reached), max(report.reached)
        kinds += f", {'in ' if last >= 0 else ''}{span(first, last)} of {federation.rounds}"
    note(
        f"Faults: {kinds}, within {report.faulty_seconds:.0f} s; {report.starts.total()} starts of "
        f"{len(federation.peers)} peers; finished {report.settling_seconds:.0f} s after everything was mended."
    )
    if wrong:
        raise PeersDisagreeError(f"{len(wrong)} things are wrong in {out}: " + "; ".join(wrong[:20]))
    if reason := report.too_little(federation.rounds, faults):
        raise IncompleteError(f"nothing was found wrong in {out}, but too little was tried: {reason}")
    same = "every round has the bytes of the undisturbed run" if reference else "all histories agree"
    note(f"Nothing is wrong: {same}, and the recorded events of every peer replay to the same decisions.")


def _show(console: Console, summary: Summary, alone: Summary | None, path: Path) -> None:
    console.print(result_table(summary, alone))
    console.print(f"Results: {path}", soft_wrap=True, highlight=False)
