"""What the documents name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from crad_p2p.federation import build_federation
from crad_p2p.methods.catalogue import METHODS
from launch.template import render
from peer._proto.crad.v1 import peer_pb2
from peer.hello import describe_data_difference

ROOT = Path(__file__).parents[1]


def test_every_test_that_operations_names_is_there_and_every_failure_names_one() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| +(\d+) \|(.*)\|$", text, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == [*range(1, 22), 23, 24, 25]
    for number, row in rows:
        named = re.findall(r"`(test_\w+): (test_\w+)`", row)
        assert named, f"row {number}"
        for file, test in named:
            assert re.search(rf"def {test}\(", (ROOT / "tests" / f"{file}.py").read_text()), f"{file}: {test}"


def test_links_between_documents_lead_somewhere() -> None:
    for path in (ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_method_is_in_the_documents_and_the_template() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    offered = render(3, "digits").split("method:")[1].split("temperature:")[0]
    for name in METHODS:
        assert f"`{name}`" in text, name
        assert re.search(rf"\b{name}\b", offered), name


@pytest.mark.parametrize("section", ["fedmkd", "dfml", "msfkd", "fedgd"])
def test_the_settings_of_a_method_stand_in_the_template_with_their_defaults(section: str) -> None:
    text = render(3, "digits").replace("name: crad ", f"name: {section} ").replace("# transfer_s", "transfer_s")
    plain = build_federation(yaml.safe_load(text), "test")
    spelled_out = build_federation(yaml.safe_load(text.replace(f"# {section}:", f"{section}:")), "test")
    assert plain.method != spelled_out.method
    assert plain.digest() == spelled_out.digest()


def test_that_data_are_one_common_set_or_own_is_said_wherever_one_begins() -> None:
    top = " ".join((ROOT / "README.md").read_text().split("## Try it")[0].split())
    assert "every host has the same whole set" in top
    assert "Sites bring images of their own" in top
    head = " ".join(render(3, "digits").replace("#", " ").split())
    assert "every host must have the same whole data set" in head
    assert "everybody can compute the true ones all the same" in head
    assert yaml.safe_load(render(3, "digits"))["privacy"] == {"count_epsilon": None}
    there, here = (peer_pb2.Data(class_names=["a"], image_shape=[1], partition_digest=each * 64) for each in "ab")
    said = describe_data_difference(there, here, 1, 0)
    assert said is not None
    assert "all peers cut their shards out of one common data set: give both the same whole set, not images of" in said


def test_the_tables_of_the_performance_page_are_of_the_figures_that_were_measured() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "table.py", "--check"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
