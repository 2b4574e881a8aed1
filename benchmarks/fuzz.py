"""Fuzzes what comes in of other institutions, guided by coverage (atheris; Linux x86-64).

    pip install ".[test,fuzz]"
    python benchmarks/fuzz.py                                # a minute for each target
    python benchmarks/fuzz.py --target manifest --seconds 600

The targets are those of tests/fuzzing.py: manifests, messages, the chunks of a transfer, safetensors files and
certificates, each begun from right ones. Prints executions, coverage as atheris says it, and findings, which are kept
in --out; ends with 1 if there are any. Make each of them a regression test (tests/test_fuzz.py).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
NAMES = ("manifest", "messages", "chunks", "safetensors", "certificate")


def fuzz(name: str, arguments: list[str]) -> None:
    """Fuzz one target in this process, which atheris ends."""
    import atheris

    with atheris.instrument_imports(include=["crad_p2p", "peer", "fuzzing", "json"]):
        import fuzzing
    target, seeds = fuzzing.TARGETS[name]
    corpus = Path(arguments[-1])
    for i, seed in enumerate(seeds()):
        (corpus / f"seed-{i}").write_bytes(seed)
    counts = {"runs": 0, "accepted": 0}

    def one(content: bytes) -> None:
        counts["runs"] += 1
        counts["accepted"] += target(content)
        if counts["runs"] & (counts["runs"] - 1) == 0:
            print(f"accepted {counts['accepted']} of {counts['runs']}", file=sys.stderr, flush=True)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def run(name: str, seconds: int, out: Path) -> int:
    """Fuzz one target in a process of its own, and say what came of it; the number of findings."""
    with tempfile.TemporaryDirectory() as corpus:
        before = set(out.iterdir())
        # A second is far more than anything here takes; 2 GB are far more than torch needs.
        limits = [f"-max_total_time={seconds}", "-timeout=5", "-rss_limit_mb=3000", "-max_len=20000"]
        command = [sys.executable, __file__, "--inside", name, *limits, f"-artifact_prefix={out}/{name}-", corpus]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        found = set(out.iterdir()) - before
        (out / f"{name}.log").write_text(done.stdout + done.stderr)
    executions = re.findall(r"^#(\d+)", done.stderr, re.MULTILINE)
    coverage = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)
    accepted = re.findall(r"^accepted (.*)", done.stderr, re.MULTILINE)
    print(
        f"{name}: {int(executions[-1]) if executions else 0:,} executions, "
        f"coverage {coverage[-1][0] if coverage else 0} edges and {coverage[-1][1] if coverage else 0} features, "
        f"accepted {accepted[-1] if accepted else 'none'}, {len(found)} findings",
        flush=True,
    )
    if done.returncode and not found:
        print(done.stderr[-3_000:], file=sys.stderr)
        return 1
    for path in sorted(found):
        print(f"  {path}", flush=True)
    return len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--target", choices=NAMES, action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="where findings are kept")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sys.exit(min(1, sum([run(name, options.seconds, options.out) for name in options.target or NAMES])))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        main()
