"""Load the dense module of an exported model with torch alone, and make an ONNX model of it.

    python examples/load_dense.py exported/40            # or exported/40/entry
    python examples/load_dense.py exported/40 --onnx dense.onnx

The second needs `pip install onnx onnxscript`. Rows are not in it: they are inputs, by the names
and shapes in signature.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path, help="folder with dense.pt2 and signature.json")
    parser.add_argument("--onnx", type=Path, help="file to write")
    arguments = parser.parse_args()
    signature = json.loads((arguments.bundle / "signature.json").read_text())
    program = torch.export.load(arguments.bundle / signature["dense_program"])

    batch = 2
    # These three come first, None where the model has no such input; then those of sequences.
    given = dict.fromkeys(("dense", "embeddings", "first_order"))
    for one in signature["dense_inputs"]:
        dtype = getattr(torch, one["dtype"])
        given[one["name"]] = torch.zeros(batch, *one["shape"][1:], dtype=dtype)
    inputs = tuple(given.values())
    logits = program.module()(*inputs)
    print(f"{len(logits)} logits of {signature['dense_program']}")

    if arguments.onnx is not None:
        torch.onnx.export(program, inputs, dynamo=True).save(arguments.onnx)
        print(f"written: {arguments.onnx}")


if __name__ == "__main__":
    main()
