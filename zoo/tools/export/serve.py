"""Run the programs in this folder, a model exported by equizoo. Needs jax, numpy and flatbuffers, nothing else.

python serve.py "1 2 3" "4 5" --new 8      a decoder: token ids of each row; prints new ones, the most likely
python serve.py "1 2 3" "4 5"              an encoder of texts: prints where logits or features are largest
python serve.py images.npy                 an encoder of images, "batch channels height width"
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
from jax import export

FOLDER = Path(__file__).parent


def load_export(folder=FOLDER):
    """Return the description of the folder, its programs by name, compiled at their first call, and its weights."""
    about = json.loads((folder / "export.json").read_text())
    if jax.device_count() < about["devices"]:
        raise SystemExit(f"the programs run on {about['devices']} devices, and {jax.device_count()} were found")
    read = lambda name: export.deserialize(bytearray((folder / f"{name}.jax_export").read_bytes()))
    artifacts = {name: read(name) for name in about["programs"]}
    # Of prefill and decode argument 3, the states, is donated: caches are updated in place.
    donated = {"prefill": 3, "decode": 3}
    programs = {name: jax.jit(x.call, donate_argnums=donated.get(name, ())) for name, x in artifacts.items()}
    return about, programs, read_weights(folder / "weights.safetensors", artifacts["forward"], about["mesh"])


def read_weights(path, artifact, mesh):
    """Map a safetensors file into memory, and put its arrays where a program expects its first argument."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    spans = {name: x["data_offsets"] for name, x in json.loads(data[8:start].tobytes()).items() if name[:2] != "__"}
    unflatten = lambda leaves: jax.tree.unflatten(artifact.in_tree, leaves)[0][0]
    shapes = unflatten(artifact.in_avals)
    view = lambda x, first, end: data[start + first : start + end].view(x.dtype).reshape(x.shape)
    weights = {name: view(shapes[name], *span) for name, span in spans.items()}
    if not mesh:
        return jax.device_put(weights)
    mesh = jax.make_mesh(tuple(mesh.values()), tuple(mesh), (jax.sharding.AxisType.Auto,) * len(mesh))
    return jax.device_put(weights, unflatten(artifact.in_shardings_jax(mesh)))


def generate_tokens(about, programs, weights, rows, new):
    """Yield the most likely next token of each row, `new` times."""
    width = about["seq_len"]
    longest = max(map(len, rows))
    if longest + new > about["length"]:
        raise SystemExit(f"{longest} tokens and {new} new ones do not fit into caches for {about['length']}")
    tokens = np.zeros((len(rows), -(-longest // width) * width), np.int32)
    positions = np.full_like(tokens, -1)  # padding is on the left, at position -1
    for i, row in enumerate(rows):
        tokens[i, -len(row) :] = row
        positions[i, -len(row) :] = np.arange(len(row))
    states = programs["init"](weights, np.zeros(len(rows), np.int32))
    for i in range(0, tokens.shape[1], width):
        logits, states = programs["prefill"](weights, tokens[:, i : i + width], positions[:, i : i + width], states)
    position = positions[:, -1:]
    for i in range(new):
        token = np.asarray(logits).argmax(-1).astype(np.int32)
        yield token
        if i + 1 < new:
            position = position + 1
            logits, states = programs["decode"](weights, token[:, None], position, states)


def forward(about, programs, weights, rows):
    """Return the logits of rows of tokens, or their features by name. Padding is on the right."""
    width = max(map(len, rows)) if about["seq_len"] == "symbolic" else about["seq_len"]
    described = about["programs"]["forward"]["inputs"]
    inputs = {name: np.zeros((len(rows), width), x["dtype"]) for name, x in described.items()}
    for i, row in enumerate(rows):
        inputs["tokens"][i, : len(row)] = row
        if "mask" in inputs:
            inputs["mask"][i, : len(row)] = True
    return programs["forward"](weights, *inputs.values())


def read_rows(about, words):
    """Parse the token ids of each row."""
    try:
        rows = [[int(token) for token in row.split()] for row in words]
    except ValueError:
        raise SystemExit("a row is token ids in quotes, as in '5 17 3', not text, which is tokenized before") from None
    if about["batch"] not in ("symbolic", len(rows)):
        raise SystemExit(f"the programs take {about['batch']} rows, and {len(rows)} were given")
    if not all(row and min(row) >= 0 and max(row) < about["vocabulary"] for row in rows):
        raise SystemExit(f"a row is one or more token ids from 0 to {about['vocabulary'] - 1}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="token ids of a row, in quotes; or a file of images")
    parser.add_argument("--new", type=int, default=16, help="number of new tokens of a decoder")
    arguments = parser.parse_args()
    about, programs, weights = load_export()
    if about["kind"] == "image encoder":
        result = programs["forward"](weights, np.load(arguments.rows[0]).astype(np.float32))
    elif "decode" in programs:
        rows = read_rows(about, arguments.rows)
        for row in np.stack(list(generate_tokens(about, programs, weights, rows, arguments.new)), 1):
            print(*row)
        return
    else:
        result = forward(about, programs, weights, read_rows(about, arguments.rows))
    if not isinstance(result, dict):
        result = {"logits": result}
    for name, x in result.items():
        print(name, x.shape, x.dtype, "largest at", *np.asarray(x, np.float32).argmax(-1).ravel())


if __name__ == "__main__":
    main()
