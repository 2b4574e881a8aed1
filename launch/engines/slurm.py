"""Runs as jobs of Slurm, one each, by submitit."""

from __future__ import annotations

import getpass
import hashlib
import logging
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from crad_p2p.errors import ConfigurationError, ExitCode, IncompleteError, UsageError
from launch.engines import Job, Need
from launch.engines.node import Report, make_run_in_time
from launch.engines.scheduled import RefusedError

_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
#: Options of sbatch that would change what a job is; submitit or this module sets them.
_OURS = frozenset(("array", "chdir", "error", "input", "job_name", "nodes", "ntasks", "ntasks_per_node", "open_mode"))
_OURS |= frozenset(("output", "parsable", "signal", "test_only", "wait", "wrap"))
#: By which a user may ask for a GPU.
_GPU_OPTIONS = frozenset(("gres", "gpus", "gpus_per_node", "gpus_per_task", "gpus_per_socket", "tres_per_task"))
_COMMAND_SECONDS = 60
#: squeue answers for all jobs at once; its users are asked not to call it often.
_QUEUE_SECONDS = 15.0
#: A job that is no longer in the queue has written its result; on a shared filesystem that is seen so much later.
_RESULT_SECONDS = 60.0
#: Slurm kills what has not ended half a minute after it was cancelled.
_CANCEL_SECONDS = 90.0


def settings_of(words: Sequence[str]) -> dict[str, str | bool]:
    """Options of sbatch from ``KEY=VALUE``, or ``KEY`` for one that takes no value; with ``_`` for ``-``, as submitit
    has them.

    Raises:
        UsageError: one is given twice, has no name, or is not for a user to decide.
    """
    found: dict[str, str | bool] = {}
    for word in words:
        name, equals, value = word.partition("=")
        key = name.strip().removeprefix("--").replace("-", "_")
        if not key.replace("_", "").isalnum() or (equals and not value):
            raise UsageError(f"--slurm {word}: expected an option of sbatch, as in partition=short or exclusive")
        if key in _OURS:
            raise UsageError(f"--slurm {word}: that option is set for every run, so leave it out")
        if key in found:
            raise UsageError(f"--slurm: {key} is given twice; leave one out")
        found[key] = value if equals else True
    return found


def compute_on(device: str, settings: Mapping[str, str | bool]) -> str:
    """``cuda`` or ``cpu``: what runs compute on. Nobody here knows what nodes have: ``auto`` is what was asked for.

    Args:
        device: as ``--device`` takes it.
    """
    asks = any("gpu" in f"{key}={value}" for key, value in settings.items() if key in _GPU_OPTIONS)
    return "cuda" if device == "cuda" or (device == "auto" and asks) else "cpu"


def sbatch_options(need: Need, device: str, settings: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """What a job asks for: one core, memory, a GPU if it computes on one, and what the user adds or says otherwise.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    asked: dict[str, str | bool] = {"cpus_per_task": "1"}
    if not any(key == "mem" or key.startswith("mem_per_") for key in settings):
        asked["mem"] = f"{math.ceil(need.host / 2**20)}M"
    if device == "cuda" and not _GPU_OPTIONS & settings.keys():
        asked["gres"] = "gpu:1"
    return {**asked, **settings}


def name_of(out: Path) -> str:
    """What the jobs of a comparison are called, so that those of an earlier command are found."""
    return f"crad-{hashlib.sha256(str(out).encode()).hexdigest()[:8]}"


class SlurmScheduler:
    """Of the cluster whose commands are on the PATH.

    Args:
        executor: of submitit, for one job after the other.
        name: of all jobs.
        settings: see :func:`settings_of`.
    """

    def __init__(self, executor: Any, device: str, name: str, settings: Mapping[str, str | bool]) -> None:
        self.device = device
        self._executor = executor
        self._name = name
        self._settings = settings
        self._given = 0
        self._looked = float("-inf")
        #: Jobs whose result is not there, and since when they have no longer been in the queue; None while they are.
        self._gone: dict[str, float | None] = {}

    def submit(self, job: Job) -> Callable[[], Report | None]:
        """See :class:`launch.engines.scheduled.Scheduler`."""
        import submitit

        options = {**sbatch_options(job.need, self.device, self._settings)}
        options.setdefault("comment", job.name)
        self._executor.update_parameters(additional_parameters=options)
        self._given += 1  # before it is: a job that was begun when an interrupt came is cancelled too
        try:
            submitted = self._executor.submit(make_run_in_time, str(job.folder), job.arguments(self.device))
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError) as error:
            self._given -= 1
            raise RefusedError(f"Slurm does not take a run: {_sentence(str(error))}; --slurm sets options") from None
        self._gone[submitted.job_id] = None
        return lambda: self._report(submitted)

    def _report(self, job: Any) -> Report | None:
        paths = job.paths
        with suppress(OSError):  # as submitit does: it makes a shared filesystem look again
            paths.folder.chmod(paths.folder.stat().st_mode)
        if paths.result_pickle.exists():
            self._forget(job)
            return self._result(job)
        if not self._is_gone(job.job_id):
            return None
        self._forget(job)
        state = job.get_info().get("State", "state unknown")
        said = _last_line(paths.stderr)  # Slurm's own words too; the other file has submitit's
        hint = f"its last words: {said}" if said else f"does its node see {paths.folder}?"
        return Report("", ExitCode.INCOMPLETE, f"job {job.job_id} of Slurm ended without a result ({state}); {hint}")

    def _result(self, job: Any) -> Report:
        import submitit

        try:
            report: Report = job.result()
        except submitit.core.utils.FailedJobError as error:
            trace = str(error).split("-" * 22)  # submitit puts it between two such lines
            return Report("", ExitCode.INCOMPLETE, f"job {job.job_id} of Slurm: {_sentence(trace[1 % len(trace)])}")
        if report.code == 0:
            paths = job.paths
            for path in (
                paths.submission_file,
                paths.submitted_pickle,
                paths.result_pickle,
                paths.stderr,
                paths.stdout,
            ):
                path.unlink(missing_ok=True)
        return report

    def _is_gone(self, job: str) -> bool:
        now = time.monotonic()
        if now >= self._looked + _QUEUE_SECONDS:
            self._looked = now
            queued = in_queue(self._name)
            if queued is not None:
                self._gone = {each: None if each in queued else since or now for each, since in self._gone.items()}
        since = self._gone[job]
        return since is not None and now >= since + _RESULT_SECONDS

    def _forget(self, job: Any) -> None:
        del self._gone[job.job_id]
        self._given -= 1

    def close(self) -> None:
        """See :class:`launch.engines.scheduled.Scheduler`."""
        if self._given:
            cancel(self._name)


def connect(out: Path, device: str, settings: Mapping[str, str | bool]) -> tuple[SlurmScheduler, str]:
    """Cancel what an earlier command for this folder has left, which nobody waits for any more.

    Args:
        out: folder that all nodes must see.
        device: ``auto``, ``cpu`` or ``cuda``.

    Returns:
        The scheduler, and where runs go, for people.

    Raises:
        ConfigurationError: there is no Slurm here.
    """
    if missing := [command for command in _COMMANDS if shutil.which(command) is None]:
        raise ConfigurationError(
            f"--engine slurm calls {', '.join(_COMMANDS)}, and {', '.join(missing)} cannot be found; run this command "
            f"on a machine from which Slurm jobs are submitted"
        )
    import submitit

    logging.getLogger("submitit").setLevel(logging.CRITICAL)  # it would write into the table
    name = name_of(out)
    left = in_queue(name)
    if left is None:
        raise ConfigurationError("squeue does not answer; see what it says, and start the same command again")
    words = ""
    if left:
        cancel(name)
        words = f" {len(left)} left by an earlier command {'were' if len(left) > 1 else 'was'} cancelled."
    executor = submitit.SlurmExecutor(folder=out / "slurm")
    executor.update_parameters(job_name=name, time=None, wckey=None)  # submitit would set five minutes
    return (
        SlurmScheduler(executor, compute_on(device, settings), name, settings),
        f"Runs are jobs of Slurm called {name}: squeue --name={name}.{words}",
    )


def in_queue(name: str) -> frozenset[str] | None:
    """Jobs of this user with this name that are not over; None if Slurm does not answer."""
    said = _run("squeue", "--noheader", f"--user={getpass.getuser()}", f"--name={name}", "--format=%A")
    return None if said is None else frozenset(said.split())


def cancel(name: str) -> None:
    """Cancel them, and wait until they are gone.

    Raises:
        IncompleteError: they are not.
    """
    own = f"--user={getpass.getuser()}"
    _run("scancel", own, f"--name={name}")
    until = time.monotonic() + _CANCEL_SECONDS
    while (left := in_queue(name)) is None or left:
        if time.monotonic() > until:
            raise IncompleteError(
                f"jobs of this comparison could not be cancelled; end them with 'scancel {own} --name={name}' before "
                f"the same command is started again"
            )
        time.sleep(1)


def _run(*command: str) -> str | None:
    """What it says. In a session of its own, so that Ctrl-C does not end it."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_COMMAND_SECONDS, start_new_session=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _last_line(path: Path) -> str:
    try:
        return _sentence(path.read_text(errors="replace"))
    except OSError:
        return ""


def _sentence(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
