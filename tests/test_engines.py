"""Engines of ``crad-mesh compare``: that each makes runs as the others do, and what schedulers are asked for.

Where Ray or submitit is not installed, what needs it is skipped; nothing here needs a cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import slurm_here
from test_compare import NEED, plan_of, stuck_jobs, wait_for_end
from typer.testing import CliRunner

from crad_p2p import __version__
from crad_p2p.errors import ConfigurationError, UsageError
from launch.cli import app
from launch.compare import choice
from launch.compare.session import prepare
from launch.compare.timing import SideBySide
from launch.engines import LOG, Began, Ended, Engine, Job, Need
from launch.engines.local import Device, LocalEngine, Machine
from launch.engines.node import Report, Seen, look, make_run
from launch.engines.ray_cluster import Node, check_nodes, compute_on, demand
from launch.engines.scheduled import RefusedError, ScheduledEngine
from launch.engines.slurm import compute_on as compute_on_slurm
from launch.engines.slurm import in_queue, name_of, sbatch_options, settings_of

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install '.[ray]'")
needs_submitit = pytest.mark.skipif(find_spec("submitit") is None, reason="needs submitit: pip install '.[slurm]'")
ENGINES = ["local", pytest.param("ray", marks=needs_ray), pytest.param("slurm", marks=needs_submitit)]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def slurm_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Slurm's commands are those of ``slurm_here``; where the jobs are."""
    jobs = tmp_path / "slurm-here"
    monkeypatch.setenv("PATH", f"{slurm_here.install(jobs)}:{os.environ['PATH']}")
    monkeypatch.setenv(slurm_here.FOLDER, str(jobs))
    yield jobs
    slurm_here.end(jobs)


@pytest.fixture
def make_engine(tmp_path: Path, slurm_jobs: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Engines with two cores."""
    del slurm_jobs  # only that they are there

    def make(name: str, at_once: int | None = None) -> Engine:
        if name == "local":
            return LocalEngine(Machine(2, None, (Device("cpu"),)), at_once)
        for variable in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            monkeypatch.setenv(variable, "")  # so that what Ray is told does not stay for other tests
        if name == "ray":
            monkeypatch.setattr("launch.engines.ray_cluster.cores", lambda: 2)
        engine, words = choice.make_engine(name, tmp_path, "cpu", "float32", at_once, [])
        assert words.startswith("Runs are ")
        return engine

    return make


def processes_of(folder: Path) -> list[int]:
    """Those of runs whose folders lie there."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "launch.compare.run" in words and any(word.startswith(f"{folder}/") for word in words):
            found.append(int(each.parent.name))
    return found


# --- every engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_runs_are_made_as_many_at_once_as_is_allowed_and_a_failure_is_told(
    name: str, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    plan = plan_of(rounds=1)
    jobs = [Job(each.name, prepare(each, tmp_path), tmp_path, "float32", NEED) for each in plan]
    (jobs[0].folder / "peers.yaml").write_text("peers: 3\n")
    events: list[Began | Ended] = []
    running, most = 0, 0
    with closing(make_engine(name, 1).run(jobs)) as happenings:
        for happened in happenings:
            for each in happened:
                running += 1 if isinstance(each, Began) else -1
                most = max(most, running)
            events += happened
    assert [(type(each), each.job.name) for each in events] == [
        (kind, job.name) for job in jobs for kind in (Began, Ended)
    ]
    assert most == 1
    assert [each.code for each in events if isinstance(each, Ended)] == [3, 0]
    assert [each.device for each in events if isinstance(each, Began)] == ["cpu"] * 2
    assert "peers.yaml: 'federation' is missing" in (jobs[0].folder / LOG).read_text()
    assert {path.name for path in jobs[1].folder.iterdir()} == {
        "peers.yaml",
        "log.txt",
        "summary.json",
        "history.jsonl",
        "cost.json",
    }


@linux_only
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_is_closed_ends_what_it_has_begun(
    name: str, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """Nothing of it stays, and what has not begun does not begin."""
    happenings = make_engine(name).run(stuck_jobs(tmp_path, 2))
    began: list[Began | Ended] = []
    while len(began) < 2 or len(pids := processes_of(tmp_path)) < 2:
        began += next(happenings)
    happenings.close()
    wait_for_end(pids)


# --- what is handed to a scheduler ------------------------------------------------------------------------------------


class Handing:
    """A scheduler whose time goes on with the sleep of its engine, and that does as a test says.

    Args:
        begins: after how many seconds a run begins.
        takes: how long it takes then.
        room: so many runs are taken at once; more are refused.
    """

    device = "cpu"

    def __init__(self, begins: float = 0.0, takes: float = 1.0, room: int = 99) -> None:
        self.now = 0.0
        self.begins, self.takes, self.room = begins, takes, room
        self.given: dict[str, float] = {}
        self.asked: list[float] = []
        self.reports: dict[str, Report] = {}
        self.closed = False

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def submit(self, job: Job) -> Callable[[], Report | None]:
        self.asked.append(self.now)
        if len(self.given) >= self.room:
            raise RefusedError("too many")
        self.given[job.name] = self.now

        def ask() -> Report | None:
            if self.now >= self.given[job.name] + self.begins:
                (job.folder / LOG).touch()
            if self.now < self.given[job.name] + self.begins + self.takes:
                return None
            del self.given[job.name]
            return self.reports.get(job.name, Report("there", 0))

        return ask

    def close(self) -> None:
        self.closed = True


def handed(scheduler: Handing, folder: Path, count: int, at_once: int | None = None) -> list[tuple[float, str, str]]:
    """Seconds, kind and run of all that happens."""
    jobs = []
    for number in range(count):
        (folder / str(number)).mkdir()
        jobs.append(Job(str(number), folder / str(number), folder, "float32", NEED))
    engine = ScheduledEngine(scheduler, at_once, clock=lambda: scheduler.now, sleep=scheduler.sleep)
    return [(scheduler.now, type(each).__name__, each.job.name) for happened in engine.run(jobs) for each in happened]


def test_a_run_has_begun_when_its_log_is_there_and_not_when_it_was_handed_over(tmp_path: Path) -> None:
    scheduler = Handing(begins=20.0)
    assert handed(scheduler, tmp_path, 2) == [
        (20.0, "Began", "0"),
        (20.0, "Began", "1"),
        (21.0, "Ended", "0"),
        (21.0, "Ended", "1"),
    ]
    assert scheduler.asked == [0.0, 0.0]
    assert scheduler.closed


def test_no_more_runs_are_handed_over_than_may_go_on(tmp_path: Path) -> None:
    scheduler = Handing(takes=5.0)
    handed(scheduler, tmp_path, 5, at_once=2)
    assert scheduler.asked == [0.0, 0.0, 5.0, 5.0, 10.0]


def test_a_scheduler_that_refuses_is_asked_again_when_a_run_is_over_and_else_seldom(tmp_path: Path) -> None:
    scheduler = Handing(takes=100.0, room=1)
    handed(scheduler, tmp_path, 2)
    assert scheduler.asked == [0.0, 0.0, 60.0, 100.0]
    (tmp_path / "more").mkdir()
    with pytest.raises(RefusedError, match="too many"):  # nothing will make room
        handed(Handing(room=0), tmp_path / "more", 1)


def test_a_run_is_over_when_what_its_node_has_written_is_seen_here(tmp_path: Path) -> None:
    """Shared filesystems show it later; not for ever, since somebody may have removed it."""
    scheduler = Handing()
    scheduler.reports = {"0": Report("there", 0, sizes={"summary.json": 3}), "1": Report("there", 0, sizes={"x": 1})}
    late = scheduler.sleep

    def sleep(seconds: float) -> None:
        late(seconds)
        if scheduler.now == 30.0:
            (tmp_path / "0" / "summary.json").write_text("abc")
        elif scheduler.now == 29.0:
            (tmp_path / "0" / "summary.json").write_text("a")

    scheduler.sleep = sleep  # type: ignore[method-assign]
    ended = [each for each in handed(scheduler, tmp_path, 2) if each[1] == "Ended"]
    assert ended == [(30.0, "Ended", "0"), (91.0, "Ended", "1")]


def test_how_many_go_side_by_side_is_the_most_of_the_last_minute() -> None:
    side_by_side = SideBySide()
    seen = [(0, 8), (10, 2), (30, 1), (59, 0), (61, 2), (80, 1), (122, 1), (200, 0)]
    assert [side_by_side.of(now, running) for now, running in seen] == [8, 8, 8, 8, 2, 2, 1, 1]


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_a_node_that_does_not_see_a_folder_says_so_and_makes_no_run(tmp_path: Path) -> None:
    report = make_run(str(tmp_path / "no"), [])
    assert report.code == 3
    assert f"node {report.node} does not see {tmp_path / 'no'}" in report.why


def test_a_node_says_what_it_sees_and_which_version_it_has(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc")
    assert look(str(tmp_path / "token")).token == "abc"
    assert look(str(tmp_path / "other")).token is None
    good = Seen("a", __version__, "abc", None)
    check_nodes([good], "abc", tmp_path)
    for token in (None, "xyz"):  # nothing, or another folder of that name
        with pytest.raises(ConfigurationError, match=f"node b does not see {tmp_path}: .* all nodes share"):
            check_nodes([good, Seen("b", __version__, token, None)], "abc", tmp_path)
    with pytest.raises(ConfigurationError, match=f"node b has crad-p2p 0.0, and this machine {__version__}"):
        check_nodes([good, Seen("b", "0.0", "abc", None)], "abc", tmp_path)


# --- Ray --------------------------------------------------------------------------------------------------------------

CPUS = Node("1", "a", {"CPU": 8.0, "memory": 1000.0})
GPUS = Node("2", "b", {"CPU": 8.0, "memory": 500.0, "GPU": 2.0})


def test_runs_compute_on_gpus_if_the_cluster_has_some() -> None:
    assert compute_on("auto", [CPUS]) == "cpu"
    assert compute_on("auto", [CPUS, GPUS]) == "cuda"
    assert compute_on("cpu", [CPUS, GPUS]) == "cpu"
    with pytest.raises(ConfigurationError, match="--device cuda: no node of the Ray cluster offers a GPU"):
        compute_on("cuda", [CPUS])
    with pytest.raises(ConfigurationError, match="offers a CPU"):
        compute_on("auto", [Node("3", "c", {"GPU": 1.0})])


def test_a_run_asks_for_what_it_needs_and_for_no_more_than_a_node_has() -> None:
    assert demand(Need(700, 0), "cpu", [CPUS, GPUS], None) == {"num_cpus": 1, "memory": 700}
    assert demand(Need(2000, 0), "cpu", [CPUS, GPUS], None) == {"num_cpus": 1, "memory": 1000}
    assert demand(Need(700, 90), "cuda", [CPUS, GPUS], 400) == {"num_cpus": 1, "memory": 500, "num_gpus": 0.25}
    assert demand(Need(1, 4000), "cuda", [GPUS], 400)["num_gpus"] == 1.0
    assert demand(Need(1, 1), "cuda", [GPUS], None)["num_gpus"] == 1.0


@needs_ray
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("auto", "RAY_ADDRESS is auto; expected HOST:PORT"),
        ("ray://head:10001", "expected HOST:PORT"),
        ("127.0.0.1:1", "nobody answers there .*unset RAY_ADDRESS"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_told_at_once(
    address: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigurationError, match=words):
        choice.make_engine("ray", tmp_path, "cpu", "auto", None, [])


@needs_ray
@linux_only
def test_a_ray_of_a_command_is_closed_to_others_and_ends_with_it(tmp_path: Path) -> None:
    code = """
import os, select, sys
from pathlib import Path
from launch.engines import ray_cluster
scheduler, words = ray_cluster.connect(Path(sys.argv[1]), "cpu")
import ray
from ray._common.usage.usage_lib import usage_stats_enabled
assert not usage_stats_enabled()
assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
assert "started on this machine" in words
listening = os.popen("ss -Hltnp").read()
for line in listening.splitlines():
    if any(word in line for word in ("raylet", "gcs_server", "ray::")):
        assert "127.0.0.1" in line.split()[3], line
temporary = scheduler._temporary
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
scheduler.close()
there = [os.pidfd_open(int(pid)) for pid in children if Path("/proc", pid).exists()]
left = [each for each in there if not select.select([each], [], [], 30)[0]]
print(len(children) > 2, left, temporary.exists(), list(Path(sys.argv[1]).iterdir()))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True [] False []\n", "")


# --- Slurm ------------------------------------------------------------------------------------------------------------


def test_options_of_sbatch_are_passed_on_and_have_the_last_word() -> None:
    settings = settings_of(["partition=short", "--account=a=b", "exclusive", "mem-per-cpu=3G"])
    assert settings == {"partition": "short", "account": "a=b", "exclusive": True, "mem_per_cpu": "3G"}
    assert sbatch_options(Need(2**30 + 1, 0), "cpu", {}) == {"cpus_per_task": "1", "mem": "1025M"}
    assert sbatch_options(Need(1, 0), "cpu", settings) == {"cpus_per_task": "1", **settings}
    assert sbatch_options(Need(1, 1), "cuda", {})["gres"] == "gpu:1"
    assert sbatch_options(Need(1, 1), "cuda", {"gres": "gpu:a100:1"})["gres"] == "gpu:a100:1"
    assert "gres" not in sbatch_options(Need(1, 1), "cuda", {"gpus": "1"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["=x"], "expected an option of sbatch"),
        (["time="], "expected an option of sbatch"),
        (["a b=1"], "expected an option of sbatch"),
        (["job-name=x"], "that option is set for every run"),
        (["qos=a", "qos=b"], "qos is given twice"),
    ],
)
def test_options_that_are_none_or_would_change_what_a_job_is_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_of(words)


def test_jobs_compute_on_a_gpu_if_one_is_asked_for() -> None:
    assert compute_on_slurm("auto", {}) == "cpu"
    assert compute_on_slurm("cuda", {}) == "cuda"
    assert compute_on_slurm("auto", {"gres": "gpu:1"}) == "cuda"
    assert compute_on_slurm("auto", {"gpus_per_node": "1"}) == "cuda"
    assert compute_on_slurm("auto", {"gres": "lustre:1"}) == "cpu"
    assert compute_on_slurm("cpu", {"gres": "gpu:1"}) == "cpu"


@needs_submitit
def test_what_sbatch_refuses_is_told_in_its_words(tmp_path: Path, slurm_jobs: Path) -> None:
    (slurm_jobs / "refuse").write_text("sbatch: error: Batch job submission failed: Invalid account\n")
    engine, _ = choice.make_engine("slurm", tmp_path, "cpu", "auto", None, ["account=nobody"])
    with pytest.raises(ConfigurationError, match=r"Slurm does not take a run: .*Invalid account.*; --slurm sets"):
        list(engine.run(stuck_jobs(tmp_path, 1)))


@needs_submitit
def test_a_job_asks_for_one_core_and_its_memory_and_has_no_time_limit_of_ours(tmp_path: Path, slurm_jobs: Path) -> None:
    engine, words = choice.make_engine("slurm", tmp_path, "cuda", "auto", None, ["partition=short", "exclusive"])
    name = name_of(tmp_path)
    assert words == f"Runs are jobs of Slurm called {name}: squeue --name={name}."
    (job,) = stuck_jobs(tmp_path, 1)
    happenings = engine.run([job])
    next(happenings)
    happenings.close()
    (script,) = slurm_jobs.glob("*/script")
    options = sorted(line for line in script.read_text().splitlines() if line.startswith("#SBATCH"))
    assert [option for option in options if "output" not in option and "error" not in option] == [
        "#SBATCH --comment=0",
        "#SBATCH --cpus-per-task=1",
        "#SBATCH --exclusive",
        "#SBATCH --gres=gpu:1",
        f"#SBATCH --job-name={name}",
        "#SBATCH --mem=1M",
        "#SBATCH --nodes=1",
        "#SBATCH --open-mode=append",
        "#SBATCH --partition=short",
        "#SBATCH --signal=USR2@90",
    ]


@linux_only
@needs_submitit
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "job 1 of Slurm ended without a result (FAILED); does its node see "),
        (signal.SIGUSR2, "the time limit of its job is over; '--slurm time=LIMIT' gives more"),
    ],
)
@pytest.mark.usefixtures("slurm_jobs")
def test_a_job_that_is_ended_says_so(
    number: signal.Signals, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.engines.slurm._QUEUE_SECONDS", 0.1)
    monkeypatch.setattr("launch.engines.slurm._RESULT_SECONDS", 0.1)
    engine, _ = choice.make_engine("slurm", tmp_path, "cpu", "auto", None, [])
    events: list[Began | Ended] = []
    for happened in engine.run(stuck_jobs(tmp_path, 1)):
        events += happened
        if [type(each) for each in happened] == [Began]:
            (pid,) = processes_of(tmp_path)
            job = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])  # its parent
            os.kill(job, number)
    wait_for_end([pid])
    assert isinstance(events[-1], Ended)
    assert events[-1].code != 0
    assert events[-1].why.startswith(words)


@needs_submitit
@pytest.mark.usefixtures("slurm_jobs")
def test_what_a_command_that_was_killed_has_left_is_cancelled(tmp_path: Path) -> None:
    engine, _ = choice.make_engine("slurm", tmp_path, "cpu", "auto", None, [])
    happenings = engine.run(stuck_jobs(tmp_path, 2))
    next(happenings)
    assert in_queue(name_of(tmp_path)) == {"1", "2"}
    _, words = choice.make_engine("slurm", tmp_path, "cpu", "auto", None, [])
    assert words.endswith("2 left by an earlier command were cancelled.")
    assert in_queue(name_of(tmp_path)) == set()
    happenings.close()


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slurm", "qos=a"], "--slurm qos=a is for --engine slurm, and the engine is local"),
        (["--engine", "ray", "--slurm", "qos=a"], "and the engine is ray"),
        (["--engine", "ray", "--device", "cuda:1"], "--device cuda:1: with --engine ray its scheduler says"),
        (["--engine", "slurm", "--device", "mps"], "choose auto, cpu, cuda"),
        (["--engine", "slurm", "--slurm", "array=1-3"], "that option is set for every run"),
        (["--engine", "ray"], r"needs the package ray, .*; pip install 'crad-p2p\[ray\]'"),
        (["--engine", "slurm"], r"needs the package submitit, .*; pip install 'crad-p2p\[slurm\]'"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_written(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda _: None)
    ended = CliRunner().invoke(app, ["compare", *options, "--out", str(tmp_path / "out")])
    with pytest.raises(UsageError, match=words):
        raise ended.exception or AssertionError(ended.output)
    assert not (tmp_path / "out").exists()


@needs_submitit
def test_without_slurm_the_commands_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="sbatch, srun, squeue, scancel cannot be found"):
        choice.make_engine("slurm", tmp_path, "cpu", "auto", None, [])


def test_a_precision_that_nobody_knows_is_refused_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--precision half: use auto"):
        choice.make_engine("ray", tmp_path, "cpu", "half", None, [])
