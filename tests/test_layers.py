"""Which package may import which, and that the torch-free and grpc-free modules stay so."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCH_FREE = (
    "durable",
    "errors",
    "failpoints",
    "federation",
    "foreign",
    "forking",
    "manifest",
    "memory",
    "data.place",
    "methods.catalogue",
    "privacy",
    "snapshot",
    "participation",
    "randomness",
    "results",
    "commands",
    "lines",
    "starting",
    "parent",
)

#: Imports the modules it is given, in this order, and prints what each of them added, outermost packages only.
_PROBE = """
import importlib, json, sys
added = {}
for name in sys.argv[1:]:
    before = set(sys.modules)
    importlib.import_module(name)
    added[name] = sorted({module.partition(".")[0] for module in set(sys.modules) - before})
print(json.dumps(added))
"""


@cache
def added_by(*modules: str) -> dict[str, set[str]]:
    """What importing these modules one after the other loads, in a fresh interpreter outside of the repository."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *modules], cwd="/", capture_output=True, text=True, timeout=120, check=True
    )
    return {name: set(packages) for name, packages in json.loads(done.stdout).items()}


def test_the_bare_package_loads_nothing_else() -> None:
    assert added_by("crad_p2p")["crad_p2p"] == {"crad_p2p"}


@pytest.mark.parametrize("name", TORCH_FREE)
def test_what_the_service_reads_is_torch_free(name: str) -> None:
    modules = [f"crad_p2p.{each}" for each in TORCH_FREE]
    assert not added_by(*modules)[f"crad_p2p.{name}"] & {"torch", "torchvision", "medmnist", "numpy", "grpc"}


SERVICE = ("peer.node", "peer.cli")
METHOD = ("crad_p2p.client", "crad_p2p.simulation", "crad_p2p.learner")


@pytest.mark.parametrize("name", SERVICE)
def test_the_service_loads_neither_torch_nor_the_launcher(name: str) -> None:
    assert not added_by(*SERVICE)[name] & {"torch", "torchvision", "medmnist", "launch"}


@pytest.mark.parametrize("name", METHOD)
def test_the_method_loads_neither_grpc_nor_the_service(name: str) -> None:
    assert not added_by(*METHOD)[name] & {"grpc", "google", "peer", "launch"}


def test_the_probe_sees_what_is_loaded() -> None:
    assert "torch" in added_by(*METHOD)["crad_p2p.client"]
    assert "grpc" in added_by(*SERVICE)["peer.node"]


# --- every import statement, also those inside functions and those for type checkers ----------------------------------


def imports_of(package: str) -> dict[str, set[str]]:
    """Module file -> dotted names of everything it imports, at any depth."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno} imports relatively, which this check does not follow"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        found[str(path.relative_to(ROOT))] = names
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("crad_p2p", {"grpc", "google", "peer", "launch"}),
        ("peer", {"torch", "torchvision", "medmnist", "launch"}),
    ],
)
def test_arrows_go_one_way(package: str, forbidden: set[str]) -> None:
    imports = imports_of(package)
    assert len(imports) > 5
    wrong = [
        f"{module} imports {name}"
        for module, names in imports.items()
        for name in names
        if name.partition(".")[0] in forbidden
    ]
    assert wrong == []


def test_the_service_imports_of_the_method_only_what_is_torch_free() -> None:
    allowed = {f"crad_p2p.{name}" for name in TORCH_FREE} | {"crad_p2p.__version__"}
    wrong = [
        f"{module} imports {name}"
        for module, names in imports_of("peer").items()
        for name in names
        if name.startswith("crad_p2p") and not any(name == each or name.startswith(f"{each}.") for each in allowed)
    ]
    assert wrong == []
