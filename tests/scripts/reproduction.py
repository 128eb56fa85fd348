"""Compare a case that a script has made again with the committed one."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def assert_made_again(made: Path, committed: Path) -> None:
    """Compare byte by byte if the same versions and CPU made both folders; else configs and, to rounding, tensors."""
    names = {path.name for path in committed.iterdir()}
    assert {path.name for path in made.iterdir()} == names
    metas = [json.loads((folder / "meta.json").read_text()) for folder in (made, committed)]
    if metas[0]["versions"] == metas[1]["versions"]:
        assert all((made / name).read_bytes() == (committed / name).read_bytes() for name in names)
    assert metas[0]["seed"] == metas[1]["seed"]
    for name in sorted(names - {"meta.json"}):
        read = load_file if name.endswith(".safetensors") else read_config
        ours, theirs = read(made / name), read(committed / name)
        assert ours.keys() == theirs.keys(), name
        for key, x in theirs.items():
            if isinstance(x, np.ndarray):
                tolerance = 2e-2 if key.startswith("bfloat16.") else 1e-5  # of the largest value
                np.testing.assert_allclose(ours[key], x, rtol=0, atol=tolerance * abs(x).max(initial=0), err_msg=key)
            else:
                assert ours[key] == x, f"{name}: {key}"


def read_config(path: Path) -> dict:
    config = json.loads(path.read_text())
    config.pop("transformers_version", None)
    return config
