"""``crad-mesh explain``: what it says is what the method does, and it says nothing of snapshots that are not right."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from crad_p2p import weights
from crad_p2p.data.datasets import load_dataset
from crad_p2p.errors import ConfigurationError, CradError, DataError, IncompleteError, UsageError
from crad_p2p.explanation import Explanation, Teacher, apart, collapse, explain, labels_that_matter
from crad_p2p.federation import Federation, build_federation, load_federation
from crad_p2p.frozen import frozen
from crad_p2p.manifest import ClassStatistics, Manifest
from crad_p2p.methods.catalogue import METHODS
from crad_p2p.results import Summary
from crad_p2p.snapshot import SNAPSHOT_FILE
from launch.authority import throwaway
from launch.cli import app
from launch.compare import figures
from launch.explain import figure as drawing
from launch.explain.command import show
from launch.explain.image import find_image
from peer.credentials import load_credentials
from peer.signatures import sign_manifest
from peer.store import MANIFEST, Store

ROOT = Path(__file__).parents[1]
TINY = [
    "--count",
    "4",
    "--rounds",
    "2",
    "--samples",
    "400",
    "--pool",
    "cnn6@0.125",
    "--threads",
    "1",
    "--device",
    "cpu",
]


# --- the formula, by hand ---------------------------------------------------------------------------------------------


def federation(peers: int, name: str = "crad", **method: Any) -> Federation:
    return build_federation(
        {
            "federation": "tiny",
            "method": {"name": name, **method},
            "peers": [{"id": i, "address": f"host:{i + 1}", "arch": "cnn6"} for i in range(peers)],
        },
        "test",
    )


def teacher(peer: int, posterior: Sequence[float], counts: Sequence[int], hits: Sequence[int]) -> Teacher:
    statistics = ClassStatistics(counts=tuple(counts), hits=tuple(hits), predicted=tuple(counts))
    return Teacher(peer, "cnn6", 3, statistics, tuple(posterior))


#: Of class 0 peer 1 has one image, and peer 4 says something quite different; class 2 nobody has.
OWN = teacher(0, [0.2, 0.5, 0.3], [0, 0, 0], [0, 0, 0])
TEACHERS = [
    teacher(1, [0.90, 0.05, 0.05], [1, 9, 0], [1, 3, 0]),
    teacher(2, [0.70, 0.20, 0.10], [8, 4, 1], [6, 2, 1]),
    teacher(3, [0.60, 0.25, 0.15], [20, 5, 0], [19, 5, 0]),
    teacher(4, [0.10, 0.60, 0.30], [3, 1, 1], [3, 1, 0]),
]


def precision(n: int, h: int) -> float:
    accuracy = (h + 2) / (n + 4)
    return (n + 4) / (accuracy * (1 - accuracy))


def test_who_is_dropped_and_what_the_others_weigh_follow_from_the_papers_equations() -> None:
    found = explain(federation(5), TEACHERS, OWN)
    first = found.classes[0]
    q = np.array([0.7, 0.6, 0.1])  # of those with two images or more
    consensus = q.mean()
    deviation = np.abs(q - consensus)
    tau = np.median(deviation)
    w = np.array([precision(8, 6), precision(20, 19)])
    assert deviation[2] > tau >= max(deviation[:2])
    assert (first.consensus, first.threshold) == (pytest.approx(consensus), pytest.approx(tau))
    assert [each.kept for each in first.opinions] == [False, True, True, False]
    assert first.opinions[0].deviation is None
    assert [each.deviation for each in first.opinions[1:]] == pytest.approx(list(deviation))
    assert [each.weight for each in first.opinions] == pytest.approx([0.0, *(w / w.sum()), 0.0])
    assert [each.verdict for each in first.opinions] == [
        "dropped: 1 validation image of the class, 2 needed",
        "kept",
        "kept",
        "dropped: 0.37 from the consensus 0.47, more than the median 0.23",
    ]
    assert [(each.hits, each.counts) for each in first.opinions] == [(1, 1), (6, 8), (19, 20), (3, 3)]
    second = found.classes[1]
    v = np.array([precision(4, 2), precision(5, 5)])  # peer 1 deviates most
    assert [each.weight for each in second.opinions] == pytest.approx([0.0, *(v / v.sum()), 0.0])
    row = np.array([(w * q[:2]).sum() / w.sum(), (v * [0.2, 0.25]).sum() / v.sum(), np.mean([0.05, 0.10, 0.15, 0.30])])
    assert found.mass == pytest.approx(row.sum())
    assert found.target == pytest.approx(tuple(row / row.sum()))
    assert not found.collapsed


@pytest.mark.parametrize(
    ("empty_class", "said", "value"),
    [
        ("uniform", "the class takes the plain mean of all teachers, 0.15", 0.15),
        ("zero", "the class takes nothing", 0.0),
        ("student", "the class takes what the student itself says, 0.30", 0.3),
    ],
)
def test_a_class_that_nobody_has_images_of_says_what_was_done(empty_class: str, said: str, value: float) -> None:
    found = explain(federation(5, empty_class=empty_class), TEACHERS, OWN)
    last = found.classes[2]
    assert last.note is not None
    assert last.note.startswith(f"No teacher has 2 validation images of the class: {said}, ")
    assert f"(empty_class: {empty_class})" in last.note
    assert last.target * found.mass == pytest.approx(value)
    assert (last.consensus, last.threshold) == (None, None)
    assert [each.verdict for each in last.opinions] == [
        f"dropped: {images} of the class, 2 needed"
        for images in ("no validation image", "1 validation image", "no validation image", "1 validation image")
    ]
    assert {each.weight for each in last.opinions} == {0.0}
    assert found.classes[0].note is None


def test_a_target_without_mass_is_said_to_be_the_mean() -> None:
    sure = [teacher(peer, [0.0, 0.0, 1.0], [9, 9, 0], [9, 9, 0]) for peer in (1, 2)]
    found = explain(federation(3, empty_class="zero"), sure, OWN)
    assert found.collapsed
    assert found.target == pytest.approx((0.0, 0.0, 1.0))
    assert "less than 0.001, so the target is the plain mean of all teachers (Eq. 3)" in collapse(found.mass)


def test_methods_without_a_filter_have_weights_alone() -> None:
    found = explain(federation(5, "uniform"), TEACHERS, OWN)
    assert not found.has_filter
    assert found.target == pytest.approx(tuple(np.mean([each.posterior for each in TEACHERS], axis=0)))
    for each in found.classes:
        assert [opinion.weight for opinion in each.opinions] == pytest.approx([0.25] * 4)
        assert {(opinion.counts, opinion.deviation, opinion.verdict) for opinion in each.opinions} == {
            (None, None, "kept")
        }
    q = np.array([each.posterior for each in TEACHERS])
    sureness = np.exp((q * np.log(q)).sum(1))
    unsure = explain(federation(5, "uncertainty"), TEACHERS, OWN)
    weights_found = [opinion.weight for opinion in unsure.classes[1].opinions]
    assert weights_found == pytest.approx(list(sureness / sureness.sum()), rel=1e-6)


def test_fedmkd_has_the_peers_mean_and_the_memory() -> None:
    found = explain(federation(5, "fedmkd", fedmkd={"memory_weight": "uniform"}), TEACHERS, OWN)
    mean = np.mean([each.posterior for each in TEACHERS], axis=0)
    assert found.target == pytest.approx(tuple(0.8 * mean + 0.2 * np.array(OWN.posterior)))
    voices = found.classes[0].opinions
    assert [(each.voice, each.arch, each.weight) for each in voices] == [
        ("mean of 4 peers", None, pytest.approx(0.8)),
        ("memory of peer 0", "cnn6", pytest.approx(0.2)),
    ]
    assert voices[0].probability == pytest.approx(mean[0])


def test_classes_that_matter_are_the_true_one_both_tops_and_all_with_a_twentieth() -> None:
    def of(target: tuple[float, ...]) -> Explanation:
        return Explanation(target, 1.0, False, True, ())

    own = Teacher(0, "cnn6", 0, OWN.statistics, (0.1, 0.1, 0.1, 0.7))
    found = labels_that_matter(of((0.01, 0.9, 0.05, 0.04)), own, 0)
    assert found == {
        0: ["the true class"],
        1: ["the target's top class"],
        3: ["the student's top class"],
        2: [],
    }
    agreed = labels_that_matter(of((0.0, 0.01, 0.02, 0.97)), own, 3)
    assert agreed == {3: ["the true class", "the target's top class", "the student's top class"]}
    assert list(labels_that_matter(of((0.0, 0.01, 0.02, 0.97)), own, None)) == [3]


def test_numbers_that_differ_are_told_apart() -> None:
    assert apart(0.41, 0.12) == ("0.41", "0.12")
    assert apart(0.12304, 0.12301) == ("0.12304", "0.12301")


# --- runs -------------------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> str:
    """Output of a command that succeeds; its error otherwise."""
    ended = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated")
    invoke("simulate", *TINY, "--precision", "float32", "--keep-models", "--out", str(out))
    return out


@pytest.fixture
def run(simulated: Path, tmp_path: Path) -> Path:
    """A copy of the simulation, to be changed."""
    return Path(shutil.copytree(simulated, tmp_path / "run"))


def sign(out: Path, store: Store, number: int, **changes: Any) -> None:
    """Write a manifest anew, changed perhaps, with the signature of its peer."""
    path = store.round_dir(number) / MANIFEST
    manifest = Manifest.from_bytes(path.read_bytes())
    manifest = Manifest.model_validate({**manifest.model_dump(), **changes})
    folder = out / "tls" / str(manifest.peer)
    path.write_bytes(sign_manifest(manifest, load_credentials(folder, "local-mesh", manifest.peer)).to_bytes())


@pytest.fixture
def mesh(run: Path) -> Path:
    """The same models, where ``crad-mesh up`` has them."""
    (run / "models").rename(run / "peers")
    (run / "peers" / "peers.yaml").rename(run / "peers.yaml")
    (run / "summary.json").unlink()
    throwaway(run / "tls", "local-mesh", range(4))
    for peer in range(4):
        sign(run, Store(run / "peers" / str(peer)), 2)
    return run


def publish_as(out: Path, peer: int, number: int) -> None:
    """Let a peer of a mesh have published its model of round 2 as that of an earlier round, too."""
    store = Store(out / "peers" / str(peer))
    shutil.copytree(store.round_dir(2), store.round_dir(number))
    consumed = [each.model_copy(update={"round": number - 1}) for each in store.manifest(2).consumed]
    sign(out, store, number, round=number, model_round=number, consumed=tuple(consumed))


def explained(out: Path, *options: str, image: str = "3") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke("explain", image, "--run", str(out), "--json", *options))
    return found


def refusal(out: Path, *options: str, image: str = "3", kind: type[CradError] = CradError) -> str:
    with pytest.raises(kind) as caught:
        CliRunner().invoke(app, ["explain", image, "--run", str(out), *options], catch_exceptions=False)
    return str(caught.value)


def test_teachers_are_all_others_and_say_what_their_models_say(simulated: Path) -> None:
    found = explained(simulated, "--student", "2")
    settings = load_federation(simulated / "models" / "peers.yaml")
    images = load_dataset(settings.data, seed=settings.seed, data_dir=simulated)
    assert (found["round"], found["student"]["peer"]) == (2, 2)
    assert [each["peer"] for each in found["teachers"]] == [0, 1, 3]
    assert found["image"]["true_class"] == images.test.labels[3]
    pixels = torch.from_numpy(images.test.images[3:4]).float().div(255).sub(0.5).div(0.5)
    for each in (*found["teachers"], found["student"]):
        store = Store(simulated / "models" / str(each["peer"]))
        tensors = weights.decode((store.round_dir(2) / SNAPSHOT_FILE).read_bytes())
        with torch.no_grad():
            logits = frozen("cnn6@0.125", 10, (1, 8, 8)).bind(tensors)(pixels)[0]
        np.testing.assert_allclose(each["posterior"], torch.softmax(logits / 3.0, -1).numpy(), rtol=1e-5)
        assert each["statistics"] == store.manifest(2).statistics.model_dump(mode="json")
    teachers = [
        Teacher(each["peer"], each["arch"], 2, ClassStatistics.model_validate_json(json.dumps(each["statistics"])),
                tuple(each["posterior"]))
        for each in (*found["teachers"], found["student"])
    ]  # fmt: skip
    expected = explain(settings, teachers[:-1], teachers[-1])
    assert found["target"] == list(expected.target)
    assert [each["note"] for each in found["classes"]] == [each.note for each in expected.classes]


def test_the_state_directories_of_a_mesh_are_read_like_kept_models(simulated: Path, mesh: Path) -> None:
    assert explained(mesh) == explained(simulated)


def test_of_mixed_rounds_the_last_one_that_all_have_is_taken_and_named(mesh: Path) -> None:
    for peer in range(4):
        publish_as(mesh, peer, 1)
    shutil.rmtree(Store(mesh / "peers" / "1").round_dir(2))
    found = explained(mesh)
    assert found["round"] == 1
    assert found["notes"] == [
        "Peers 0, 2, 3 are ahead: round 1 is the last as of which every peer's snapshot is there."
    ]
    assert "round 1 of 2" in invoke("explain", "3", "--run", str(mesh))
    shutil.rmtree(Store(mesh / "peers" / "2").round_dir(1))
    assert (
        "no round of which all peers have a snapshot, but peer 0: 1, 2; peer 1: 1; peer 2: 2; peer 3: 1, 2"
        in refusal(mesh, kind=IncompleteError)
    )
    shutil.rmtree(mesh / "peers" / "1" / "rounds")
    assert "no snapshot of peer 1 is there; run 'crad-mesh up' again, which continues it" in refusal(mesh)


def test_with_participation_everybody_teaches_with_its_last_version(tmp_path: Path) -> None:
    invoke("simulate", *TINY, "--participation", "2", "--keep-models", "--out", str(tmp_path))
    settings = load_federation(tmp_path / "models" / "peers.yaml")
    found = explained(tmp_path)
    assert [each["round"] for each in found["teachers"]] == [settings.version(peer, 2) for peer in (1, 2, 3)]
    assert "2 peers take part" in found["notes"][0]


@pytest.mark.parametrize("name", [name for name, traits in METHODS.items() if not traits.has_target])
def test_methods_without_a_target_are_refused_with_those_that_have_one(run: Path, name: str) -> None:
    path = run / "models" / "peers.yaml"
    text = path.read_text().replace("name: crad", f"name: {name}")
    text = re.sub(r"^rounds: \d+$", "rounds: 30", text, flags=re.MULTILINE)  # enough for images to be made and used
    path.write_text(text.replace("  samples: 400", "  samples: 400\n  transfer_samples: 50"))
    said = refusal(run, kind=UsageError)
    assert f"its method is {name}, which makes no target" in said
    assert (
        "those that do are crad, stage1, uniform, uncertainty, acc, sup, sm, lcb, ce, inv_sigma, precision, fedmkd"
        in said
    )


def test_what_is_no_run_with_snapshots_says_what_would_be_one(run: Path, tmp_path: Path) -> None:
    assert "there is no such directory" in refusal(tmp_path / "none", kind=UsageError)
    assert "holds no run; give the --out directory" in refusal(tmp_path, kind=UsageError)
    models = run / "models"
    models.rename(tmp_path / "away")
    assert "holds a simulation without its models; make it again with --keep-models" in refusal(run)
    (run / "summary.json").unlink()
    (run / "peers.yaml").write_text("")
    assert "is not finished; with --keep-models its models are kept at its end" in refusal(run)
    comparison = tmp_path / "comparison" / "runs" / "digits-n3-crad-s1"
    comparison.mkdir(parents=True)
    (comparison / "peers.yaml").write_text("")
    assert f"holds a comparison; give the folder of one of its runs, such as {comparison}" in refusal(
        tmp_path / "comparison"
    )
    (run / "federation.json").write_text("")
    (run / "peers.yaml").unlink()
    assert "is the state directory of one peer" in refusal(run)


def test_models_of_another_run_than_the_results_are_not_explained(run: Path) -> None:
    invoke("simulate", *TINY, "--seed", "5", "--out", str(run))
    assert "holds the models of another run than that of the summary.json beside it" in refusal(
        run, kind=ConfigurationError
    )
    (run / "summary.json").write_text("{")
    assert "summary.json is damaged" in refusal(run, kind=ConfigurationError)
    (run / "summary.json").unlink()
    assert explained(run)["round"] == 2


def test_an_unknown_student_and_an_image_out_of_range_are_named(simulated: Path) -> None:
    assert "peer id 9 is not in the federation file" in refusal(simulated, "--student", "9", kind=ConfigurationError)
    assert "the test set of digits has 359 images; give a number from 0 to 358" in refusal(
        simulated, image="359", kind=UsageError
    )
    assert explained(simulated, image="358")["image"]["number"] == 358


# --- checks -----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damaged_snapshots_are_all_named(run: Path) -> None:
    folders = [Store(run / "models" / str(peer)).round_dir(2) for peer in range(4)]
    flip(folders[1] / SNAPSHOT_FILE)
    (folders[2] / MANIFEST).write_text("{")
    (folders[3] / SNAPSHOT_FILE).unlink()
    said = refusal(run, kind=IncompleteError)
    assert said.startswith(f"3 snapshots of {run} cannot be used: {folders[1]} (sha256 of the file is ")
    assert f"; {folders[2]} (manifest" in said
    assert f"; {folders[3]} (snapshot.safetensors: No such file or directory); put back a copy, or make the run" in said


def test_values_that_would_poison_a_forward_pass_are_refused(mesh: Path) -> None:
    store = Store(mesh / "peers" / "1")
    path = store.round_dir(2) / SNAPSHOT_FILE
    tensors = weights.decode(path.read_bytes())
    tensors["classifier.bias"][0] = torch.nan
    path.write_bytes(weights.encode(tensors))
    assert f"{store.round_dir(2)} (sha256 of the file is" in refusal(mesh)
    sign(mesh, store, 2, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert f"{store.round_dir(2)} (tensor 'classifier.bias' holds values that are not finite" in refusal(mesh)


def test_manifests_pass_the_checks_of_peers(mesh: Path) -> None:
    store = Store(mesh / "peers" / "1")
    path = store.round_dir(2) / MANIFEST
    genuine = path.read_bytes()
    statistics = Manifest.from_bytes(genuine).statistics
    more = statistics.model_copy(update={"counts": (statistics.counts[0] + 1, *statistics.counts[1:])})
    sign(mesh, store, 2, statistics=more.model_dump())
    assert f"{store.round_dir(2)} (manifest counts" in refusal(mesh)
    path.write_bytes(genuine.replace(b'"model_round":2', b'"model_round":1'))
    said = refusal(mesh)
    assert f"1 snapshot of {mesh} cannot be used: {store.round_dir(2)} (signature of the manifest of round 2" in said
    assert said.endswith("with --recover")
    path.write_bytes(genuine)
    (mesh / "tls" / "ca.pem").unlink()
    assert "ca.pem" in refusal(mesh)


# --- images -----------------------------------------------------------------------------------------------------------


def test_an_image_may_be_a_file_like_those_of_the_data_set(simulated: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    settings = load_federation(simulated / "models" / "peers.yaml")
    images = load_dataset(settings.data, seed=settings.seed, data_dir=simulated)
    image.fromarray(images.test.images[3, 0]).save(tmp_path / "three.png")
    found = explained(simulated, image=str(tmp_path / "three.png"))
    assert found["image"] == {"name": "three.png", "number": None, "true_class": None}
    assert found["target"] == explained(simulated)["target"]
    said = invoke("explain", str(tmp_path / "three.png"), "--run", str(simulated))
    assert said.startswith("three.png: its class is not known.")
    image.fromarray(np.zeros((9, 8), np.uint8)).save(tmp_path / "large.png")
    image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "red.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "three.png").read_bytes()[:60])
    (tmp_path / "text.png").write_text("no image")
    for name, words in (
        ("large", r"has 8x9 pixels, mode L; expected 8x8 pixels, grey"),
        ("red", r"has 8x8 pixels, mode RGB; expected 8x8 pixels, grey"),
        ("torn", r"cannot be read \(.*expected 8x8 pixels, grey, as PNG or JPEG"),
        ("text", r"cannot be read \(.*expected 8x8 pixels"),
    ):
        with pytest.raises(DataError, match=words):
            find_image(str(tmp_path / f"{name}.png"), images)
    with pytest.raises(UsageError, match="is no number and no file"):
        find_image(str(tmp_path / "none.png"), images)


# --- what is shown ----------------------------------------------------------------------------------------------------


def shown(out: Path, width: int, **options: Any) -> str:
    """What a terminal of so many columns shows, without colours."""
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=width, emoji=False, color_system=None)
    given = {"student": None, "figure": None, "as_json": False, "data_dir": None, "download": False, **options}
    show(console, "3", out, **given)
    return file.getvalue()


def test_a_terminal_of_80_columns_shows_everything(simulated: Path) -> None:
    text = shown(simulated, 80)
    assert max(map(len, text.splitlines())) <= 80
    found = explained(simulated)
    assert "…" not in text
    assert len(re.findall(r"^ teacher ", text, re.MULTILINE)) == 1 + len(found["shown"])
    words = " ".join(text.split())
    truth = found["image"]["true_class"]
    assert f"true class {truth}." in words
    assert re.search(rf"Class {truth}, the true class.*: {found['target'][truth]:.2f} of the target", words)
    for each in found["classes"][truth]["opinions"]:
        assert each["verdict"].split()[0] in words
        if each["kept"]:
            assert f"{100 * each['weight']:.1f} %" in words


def test_a_figure_needs_matplotlib_and_says_so_first(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "figures are SVG" in refusal(simulated, "--figure", "a.png", kind=UsageError)
    assert "is no directory" in refusal(simulated, "--figure", "/none/a.svg", kind=UsageError)
    monkeypatch.setattr(drawing, "can_draw", lambda: False)
    assert "pip install 'crad-p2p[plot]'" in refusal(simulated, "--figure", "a.svg", kind=UsageError)


def test_the_same_explanation_gives_the_same_figure(
    simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    make, places = drawing._make, []

    def spy(found: Any) -> Any:
        figure = make(found)
        places.extend(each for panel in figure.axes for each in panel.get_position(original=True).bounds)
        return figure

    monkeypatch.setattr(drawing, "_make", spy)
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        assert f"Figure: {file}" in shown(simulated, 400, figure=file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert b"<svg" in files[0].read_bytes()
    assert places == pytest.approx([round(each, 5) for each in places], rel=0, abs=1e-12)  # without a solver's rest


def test_the_example_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands of docs/explain.md, and what they print as far as no rounding has a say in it."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "explain.md").read_text()
    commands = re.findall(r"^    (crad-mesh .*)$", text, re.MULTILINE)
    assert len(commands) == 4
    said = []
    for command in commands:
        if "--figure" not in command or figures.can_draw():
            said.append(invoke(*shlex.split(command)[1:]))
    assert Summary.read(tmp_path / "run" / "summary.json").complete
    page, output = " ".join(text.split()), " ".join(said[1].split())
    for words in (
        "Image 8 of the test set: true class 4.",
        "Method crad, round 10 of 10. The student is peer 0, cnn6@0.25.",
        "Hits: validation images of the class that a teacher recognised, of those it has.",
        "teacher architecture hits prob. dev. weight verdict",
    ):
        assert words in page
        assert words in output
    assert json.loads(said[2])["student"]["peer"] == 3
    assert (tmp_path / "eight.svg").exists() == figures.can_draw()
