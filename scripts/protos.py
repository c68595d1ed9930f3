"""Makes the message modules of `shoal.serve.protos` from its .proto files.

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
FOLDER = ROOT / "src" / "shoal" / "serve" / "protos"
CHECK = re.compile(
    r"from google\.protobuf import runtime_version as _runtime_version\n"
    r"|_runtime_version\.ValidateProtobufRuntimeVersion\(.*?\n\)\n",
    re.DOTALL,
)


def main() -> None:
    files = sorted(FOLDER.glob("*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    # Paths under `src` become names of the descriptors' files and of the modules' imports.
    code = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'src'}",
            f"-I{include}",
            f"--python_out={ROOT / 'src'}",
            f"--pyi_out={ROOT / 'src'}",
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
