"""docs/own-images.md: its example, as it stands there, with tiny images."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pictures import pixels, save
from processes import ENVIRONMENT, certificates

from crad_p2p.federation import build_federation
from launch.quick import free_ports
from launch.template import render

PAGE = (Path(__file__).parents[1] / "docs" / "own-images.md").read_text()
CLASSES = ["adenoma", "normal", "polyp"]


def commands(word: str) -> list[list[str]]:
    """All of the page that begin so."""
    found = [shlex.split(line) for line in PAGE.splitlines() if line.startswith(f"    {word} ")]
    assert found, word
    return found


def shown(beginning: str) -> list[str]:
    """A block of the page, from the line that begins so."""
    block = re.search(rf"^    {re.escape(beginning)}.*(?:\n(?:    .*)?)*", PAGE, flags=re.MULTILINE)
    assert block, beginning
    return block[0].strip("\n").splitlines()


def tree() -> dict[str, Any]:
    found = re.search(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert found
    federation: dict[str, Any] = yaml.safe_load(found[1])
    return federation


def command_line(arguments: list[str], cwd: Path, *more: str) -> dict[str, Any]:
    """For subprocess; on the CPU, and with the commands of this checkout."""
    module = {"crad-mesh": "launch", "crad-peer": "peer"}[arguments[0]]
    command = [sys.executable, "-P", "-m", module, *arguments[1:], *more]
    return {"args": command, "cwd": cwd, "env": {**ENVIRONMENT, "COLUMNS": "80"}, "text": True}


def run(arguments: list[str], cwd: Path, *more: str) -> str:
    ended = subprocess.run(**command_line(arguments, cwd, *more), capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return str(ended.stdout)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three of the page, with its federation files on ports that are free."""
    folder = tmp_path_factory.mktemp("colon")
    for label, name in enumerate(CLASSES):
        for i in range(12):
            base = pixels(100 * label + i, 20, 16, below=80) + 80 * label
            save(folder / "site-a" / "images" / name / "2023" / f"{i}.png", base)
    rows = ["image,label,patient"]
    for i in range(1, 29):
        deep = pixels(500 + i, 20, 16, dtype=np.uint16, below=1300) + np.uint16(1300 * (1 + i % 2))
        path = save(folder / "site-b" / "scans" / f"{i:04d}.tif", deep)
        if i == 27:
            path.write_bytes(b"II*\0 and nothing else")
        rows.append(f"scans/{i:04d}.tif,{CLASSES[1 + i % 2]},P{17 + i // 3}")
    (folder / "site-b" / "images.csv").write_text("\n".join(rows) + "\n")
    (folder / "site-c").mkdir()
    labels = np.arange(24) % 3
    images = pixels(900, 24, 14, 14, below=80) + (80 * labels[:, None, None]).astype(np.uint8)
    names = ["polyp", "adenoma", "normal"]
    np.savez(folder / "site-c" / "images.npz", train_images=images, train_labels=labels, class_names=names)

    federation = tree()
    for entry, port in zip(federation["peers"], free_ports(3), strict=True):
        entry["address"] = f"127.0.0.1:{port}"
    (folder / "peers.yaml").write_text(yaml.safe_dump(federation))
    for entry, arguments in zip(federation["peers"], commands("crad-peer"), strict=True):
        entry["data"] = arguments[-1]
    (folder / "together.yaml").write_text(yaml.safe_dump(federation))
    certificates(folder, federation["federation"], range(3))
    return folder


def test_the_first_command_writes_such_a_file(tmp_path: Path) -> None:
    (arguments,) = commands("crad-mesh init")
    said = run(arguments, tmp_path)
    assert "crad-peer --id 0 --peers peers.yaml --data folder:IMAGES" in said
    written = yaml.safe_load((tmp_path / "peers.yaml").read_text())
    assert written["data"]["classes"] == CLASSES
    assert written["data"]["partition"] == {"kind": "own"}
    assert len(written["peers"]) == len(tree()["peers"]) == 3


def test_the_template_spells_out_the_defaults_and_takes_any_names() -> None:
    names = ["no", "Über gang", "{a}", "b: c"]
    text = render(3, "digits", classes=names)
    spelled = build_federation(yaml.safe_load(text), "test")
    assert list(spelled.data.classes or ()) == names
    plain = yaml.safe_load(text)
    plain["data"] = {"partition": {"kind": "own"}, "classes": names}
    assert build_federation(plain, "test").digest() == spelled.digest()
    with_test = build_federation(yaml.safe_load(text.replace("# test:", "test:")), "test")
    assert with_test.data.test == "folder:common-test"
    assert "everybody can compute" not in text
    assert max(map(len, render(3, "digits", classes=CLASSES).splitlines())) <= 120


def test_classes_and_a_data_set_contradict_each_other(tmp_path: Path) -> None:
    arguments = [*commands("crad-mesh init")[0], "--dataset", "digits"]
    ended = subprocess.run(**command_line(arguments, tmp_path), capture_output=True, timeout=60)
    assert ended.returncode == 2
    assert "--classes adenoma,normal,polyp and --dataset digits contradict each other" in " ".join(ended.stderr.split())


def test_the_check_of_the_page_says_what_is_there(sites: Path) -> None:
    (arguments,) = commands("crad-mesh check")
    said = run(arguments, sites, "--device", "cpu", "--threads", "1")
    (line,) = (line for line in said.splitlines() if " data " in line)
    assert " ".join(line.split()) == " ".join(" ".join(shown("warning  data")).split())
    assert not (sites / "crad-state").exists()


def test_the_peers_of_the_page(sites: Path) -> None:
    options = ("--device", "cpu", "--threads", "1", "--linger", "30")
    logs = [sites / f"{i}.log" for i in range(3)]
    running = []
    for arguments, log in zip(commands("crad-peer"), logs, strict=True):
        with log.open("w") as file:
            running.append(
                subprocess.Popen(**command_line(arguments, sites, *options), stdout=file, stderr=subprocess.STDOUT)
            )
    try:
        for process, log in zip(running, logs, strict=True):
            assert process.wait(120) == 0, log.read_text()
    finally:
        for process in running:
            process.kill()
            process.wait()
    found = (sites / "crad-state" / "1" / "data-summary.txt").read_text().splitlines()
    expected = [line.removeprefix("    ") for line in shown("csv:/data/site-b/images.csv: ")]
    assert found == [line.replace("/data/site-b", str(sites / "site-b")) for line in expected]


def test_together_they_have_the_same_models_byte_for_byte(sites: Path) -> None:
    snapshots = []
    for word in ("simulate", "up"):
        (arguments,) = commands(f"crad-mesh {word}")
        run(arguments, sites, "--device", "cpu")
        summary = json.loads((sites / arguments[-1] / "summary.json").read_text())
        assert summary["mean_global_accuracy"] is None
        snapshots.append([peer["snapshot_sha256"] for peer in summary["peers"]])
    assert snapshots[0] == snapshots[1]
    for i in range(3):
        result = json.loads((sites / "crad-state" / str(i) / "result.json").read_text())
        assert result["snapshot_sha256"] == snapshots[0][i]
