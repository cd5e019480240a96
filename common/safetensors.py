"""What a folder of safetensors files holds, by their headers alone: no weights are read, no torch is needed."""

import json
from pathlib import Path

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "U8": "uint8"}
"""dtype names of the format; the others stay as they are"""


def shapes_in(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (dtype, shape) by tensor name; empty for a folder without such files.

    A file begins with the length of its header, 8 bytes little-endian, and the header, JSON.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {
            name: (_DTYPES.get(told["dtype"], told["dtype"]), tuple(told["shape"]))
            for name, told in header.items()
            if "shape" in told
        }
    return found
