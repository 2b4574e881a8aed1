"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

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
