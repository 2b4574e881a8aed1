"""Generate peer/_proto from proto/, with the pinned compiler. Run it after every change of a .proto file.

    python tools/gen_proto.py            # write
    python tools/gen_proto.py --check    # exit 1 if the committed files are not what the compiler gives

The compiler is pinned to an old release on purpose: generated code works with the protobuf runtime it was made for and
with newer ones, never with an older one (1.76.0 makes code for protobuf 6.31). It is installed in a scratch virtual
environment, so that it never meets the project's own grpcio.
"""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

COMPILER = ("grpcio-tools==1.76.0", "setuptools<81")
PACKAGE = "peer/_proto"
ROOT = Path(__file__).resolve().parent.parent


def generate(output: Path) -> None:
    """Compile every file of proto/ to ``output``/peer/_proto."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch, "venv")
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *COMPILER], check=True)
        # Imports in generated code follow the path below -I, so the sources are laid out as the package will be.
        sources = Path(scratch, "sources", PACKAGE)
        shutil.copytree(ROOT / "proto", sources)
        files = sorted(sources.rglob("*.proto"))
        root = Path(scratch, "sources")
        command = [python, "-m", "grpc_tools.protoc", f"-I{root}"]
        command += [f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")]
        subprocess.run([*command, *files], check=True)
    for folder in {output / PACKAGE, *(path.parent for path in output.rglob("*_pb2.py"))}:
        while folder != output / Path(PACKAGE).parent:
            (folder / "__init__.py").touch()
            folder = folder.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "out")
        output.mkdir()
        generate(output)
        fresh, committed = output / PACKAGE, ROOT / PACKAGE
        if "--check" in sys.argv[1:]:
            names = {
                str(p.relative_to(base))
                for base in (fresh, committed)
                for p in base.rglob("*.py*")
                if p.suffix != ".pyc"
            }
            _, different, missing = filecmp.cmpfiles(fresh, committed, names, shallow=False)
            for name in sorted({*different, *missing}):
                print(f"{PACKAGE}/{name} is not what proto/ gives: run python tools/gen_proto.py")
            return 1 if different or missing else 0
        shutil.rmtree(committed, ignore_errors=True)
        shutil.copytree(fresh, committed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
