"""A Slurm that makes its jobs by processes of this machine: its commands, for the PATH of a test.

Each is this file under another name. A job is a folder of ``SLURM_OF_A_TEST``: its name, the process group of its
script once it runs, and how it has ended. What is in ``refuse`` there is what sbatch says instead of taking a job.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

FOLDER = "SLURM_OF_A_TEST"
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "sacct")


def install(folder: Path) -> Path:
    """Make the commands; their folder, for the PATH."""
    binaries = folder / "bin"
    binaries.mkdir(parents=True)
    for name in COMMANDS:
        command = binaries / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__)} {name} "$@"\n')
        command.chmod(0o755)
    return binaries


def end(folder: Path) -> None:
    """End what a test that has failed may have left."""
    for group in folder.glob("[0-9]*/group"):
        with suppress(ProcessLookupError):
            os.killpg(int(group.read_text()), signal.SIGKILL)


def jobs(folder: Path) -> list[Path]:
    return sorted((path.parent for path in folder.glob("[0-9]*/name")), key=lambda job: int(job.name))


def state_of(job: Path) -> str:
    return (job / "state").read_text() if (job / "state").exists() else "RUNNING"


def named(arguments: list[str], folder: Path) -> list[Path]:
    """The jobs that an option --name chooses and that are not over."""
    name = next(each.removeprefix("--name=") for each in arguments if each.startswith("--name="))
    return [job for job in jobs(folder) if (job / "name").read_text() == name and state_of(job) == "RUNNING"]


def sbatch(arguments: list[str], folder: Path) -> int:
    if (folder / "refuse").exists():
        sys.stderr.write((folder / "refuse").read_text())
        return 1
    script = Path(arguments[-1]).read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE))
    number = len(jobs(folder)) + 1
    job = folder / str(number)
    job.mkdir()
    (job / "script").write_text(script)
    (job / "name").write_text(options["job-name"])
    if os.fork() == 0:  # slurmd
        os.setsid()
        with Path(os.devnull).open("r+b") as nothing:
            for stream in (0, 1, 2):
                os.dup2(nothing.fileno(), stream)
        (job / "group").write_text(str(os.getpid()))
        if state_of(job) != "RUNNING":  # cancelled before it began
            os._exit(0)
        environment = {**os.environ, "SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "here"}
        code = subprocess.run(["bash", str(job / "script")], env=environment).returncode
        (job / "state").write_text("COMPLETED" if code == 0 else "FAILED")
        os._exit(0)
    print(f"Submitted batch job {number}")
    return 0


def srun(arguments: list[str], _: Path) -> int:
    files = {}
    while arguments[0].startswith("--"):
        option = arguments.pop(0)
        if option in ("--output", "--error"):
            number = os.environ["SLURM_JOB_ID"]
            files[option] = arguments.pop(0).replace("%j", number).replace("%t", "0")
    os.dup2(os.open(files["--output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(os.open(files["--error"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    os.execvp(arguments[0], arguments)


def squeue(arguments: list[str], folder: Path) -> int:
    for job in named(arguments, folder):
        print(job.name)
    return 0


def scancel(arguments: list[str], folder: Path) -> int:
    for job in named(arguments, folder):
        (job / "state").write_text("CANCELLED")
        with suppress(FileNotFoundError, ProcessLookupError):
            os.killpg(int((job / "group").read_text()), signal.SIGTERM)
    return 0


def sacct(_: list[str], folder: Path) -> int:
    print("JobID|State|NodeList")
    for job in jobs(folder):
        print(f"{job.name}|{state_of(job)}|here")
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:], Path(os.environ[FOLDER])))
