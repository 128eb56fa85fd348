"""Small tensors of a packed file that no layer holds: scales of activations, quantization tables, states in JSON.

They are kept as one text in the model's `Origin`, with equal ones stored once, and written back byte for byte.
"""

import base64
import json
from collections.abc import Mapping

import numpy as np

from ..safetensors import DTYPE_CODES, DTYPES, CheckpointError, LazyTensor

_MAX_BYTES = 1 << 16


def encode_side_tensors(tensors: Mapping[str, LazyTensor]) -> str:
    """Return a text that holds some tensors. **Raises** `CheckpointError` for a tensor of more than 64 KiB."""
    numbers: dict[tuple[str, tuple[int, ...], str], int] = {}
    names = {}
    for name, tensor in sorted(tensors.items()):
        if (data := np.ascontiguousarray(tensor.read())).nbytes > _MAX_BYTES:
            raise CheckpointError(f"{name} has {data.nbytes:,} bytes: expected at most {_MAX_BYTES:,}")
        entry = DTYPE_CODES[tensor.dtype], tensor.shape, base64.b64encode(data.tobytes()).decode()
        names[name] = numbers.setdefault(entry, len(numbers))
    if not names:
        return ""
    return json.dumps({"values": [*numbers], "names": names})


def decode_side_tensors(text: str) -> dict[str, np.ndarray]:
    """Return the tensors of a text that `encode_side_tensors` made."""
    if not text:
        return {}
    held = json.loads(text)
    values = [
        np.frombuffer(base64.b64decode(data), DTYPES[code]).reshape(shape) for code, shape, data in held["values"]
    ]
    return {name: values[number] for name, number in held["names"].items()}
