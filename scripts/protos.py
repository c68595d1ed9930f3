"""Makes the message modules of all folders `protos` from the .proto files in them.

    python scripts/protos.py

Needs grpcio-tools, which nothing else does. What it writes is committed. The check of the exact
version of protobuf that its protoc puts into a module is left out: such a module is one descriptor,
which every release reads that pyproject.toml allows, but later ones would warn.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
CHECK = re.compile(
    r"from google\.protobuf import runtime_version as _runtime_version\n"
    r"|_runtime_version\.ValidateProtobufRuntimeVersion\(.*?\n\)\n",
    re.DOTALL,
)


def main() -> None:
    files = sorted(SOURCES.rglob("protos/*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    # Paths under `src` become names of the descriptors' files and of the modules' imports.
    code = protoc.main(
        [
            "protoc",
            f"-I{SOURCES}",
            f"-I{include}",
            f"--python_out={SOURCES}",
            f"--pyi_out={SOURCES}",
            *map(str, files),
        ]
    )
    if code:
        sys.exit(code)
    for file in files:
        module = file.with_name(f"{file.stem}_pb2.py")
        module.write_text(CHECK.sub("", module.read_text()))


if __name__ == "__main__":
    main()
