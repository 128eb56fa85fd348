"""Run exports and compare, in a process that imports jax, numpy and flatbuffers only: `serve_cases.py FOLDER ...`.

Each folder has an export and `expected.npz`. Prints errors and tokens as JSON.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np


def import_serve(folder):
    spec = importlib.util.spec_from_file_location("serve", folder / "serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder):
    serve = import_serve(folder)
    about, programs, weights = serve.load_export()
    expected = dict(np.load(folder / "expected.npz"))
    inputs = [expected[name] for name in about["programs"]["forward"]["inputs"]]
    found = {"errors": [], "new": []}
    for count in (1, 3, 5):
        result = programs["forward"](weights, *(x[:count] for x in inputs))
        for name, x in result.items() if isinstance(result, dict) else [("logits", result)]:
            want = expected[name][:count]
            found["errors"].append(float(np.abs(np.asarray(x) - want).max() / np.abs(want).max()))
        if about["kind"] == "decoder":
            rows = [row[row >= 0].tolist() for row in expected["prompts"][:count]]
            new = np.stack(list(serve.generate_tokens(about, programs, weights, rows, expected["new"].shape[1])), 1)
            found["new"].append(bool((new == expected["new"][:count]).all()))
    return found


if __name__ == "__main__":
    results = [run(Path(folder)) for folder in sys.argv[1:]]
    imported = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps({"results": results, "imported": imported}))
