"""The losses that docs/preferences.md shows as lines: their values at the reference, and TRL's on the same batch.

The environment variable ZOO_PARITY names a folder with the losses of TRL's trainers.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import zoo
from scripts.page_code import list_code
from zoo import train
from zoo.models.segment_sums import sum_segments
from zoo.train import objectives

PAGE = Path(__file__).parents[2] / "docs" / "preferences.md"
PARITY = Path(os.environ.get("ZOO_PARITY", "")) / "posttraining"
SHOWN = ("def loss_fn", "def sppo", "def shorten", "def weigh_tokens", "def kto_loss")


def read_lines():
    """Run the definitions of the page, without the data and models between them."""
    names = {"jax": jax, "jnp": jnp, "np": np, "objectives": objectives, "train": train, "zoo": zoo}
    names["sum_segments"] = sum_segments
    blocks = [code for _, code in list_code(PAGE.read_text(encoding="utf-8"))]
    for start in SHOWN:
        (code,) = [code for code in blocks if start in code]
        paragraphs = code.split("\n\n")
        exec("\n\n".join(part for part in paragraphs if part.lstrip().startswith(("def ", "log_sigmoid"))), names)
    return names


LINES = read_lines()


def test_the_lines_at_the_reference():
    """Where both log-ratios are 0, and where the chosen answer is far ahead."""
    zero, far = jnp.zeros(()), jnp.array(400.0)
    log_2 = np.log(2)
    expected = {"sppo": 50.0, "nca_pair": 2 * log_2, "bco_pair": 2 * log_2, "forward_kl": log_2}
    expected |= {"jensen_shannon": log_2, "discopop": (log_2 + 1) / 2}
    for name, value in expected.items():
        assert LINES[name](zero, zero) == pytest.approx(value, rel=1e-6), name
    assert LINES["exo_pair"](zero, zero) == pytest.approx(-log_2 - (np.log1p(-1e-3) + np.log(1e-3)) / 2, rel=1e-6)
    assert LINES["discopop"](far, -far) < 1e-6 and LINES["bco_pair"](far, -far) < 1e-6
    assert LINES["exo_pair"](far, -far) == pytest.approx(-np.log1p(-1e-3), rel=1e-3)


def test_shorten_weighs_what_is_beyond_the_shorter_answer():
    weights = np.array([0, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0], np.float32)
    ids = np.array([1, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 0])
    found = LINES["shorten"]({"weights": weights, "segment_ids": ids}, 0.25)["weights"]
    assert found.tolist() == [0, 1, 0.25, 0.25, 0, 1, 0, 1, 0.25, 0, 1, 0]


@pytest.fixture(scope="module")
def trl():
    """TRL's values, batches, and both models."""
    models = [zoo.load(PARITY / name, dtype="float32") for name in ("policy", "reference")]
    values = json.loads((PARITY / "losses.json").read_text())["losses"]
    return values, load_file(PARITY / "batches.safetensors"), *models


def make_rows(stored, prefix):
    """Right-padded texts, a row each."""
    names = ("input_ids", "attention_mask", "completion_mask")
    ids, attention, completion = (stored[prefix + name] for name in names)
    following = np.pad(attention[:, 1:], ((0, 0), (0, 1))) > 0
    shift = lambda x: np.pad(x[:, 1:], ((0, 0), (0, 1)))
    return {
        "tokens": ids.astype(np.int32),
        "targets": np.where(following, shift(ids), -1).astype(np.int32),
        "weights": np.where(following, shift(completion), 0).astype(np.float32),
        "segment_ids": attention.astype(np.int32),
        "positions": np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape),
    }


@pytest.mark.skipif(not PARITY.exists(), reason="ZOO_PARITY names no folder")
def test_the_lines_are_those_of_trl(trl):
    values, stored, policy, reference = trl
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    texts = make_rows(stored, "pairs/")
    chosen, rejected = ({name: x[part] for name, x in texts.items()} for part in (slice(8), slice(8, 16)))
    rejected["segment_ids"] = 2 * rejected["segment_ids"]
    batch = {name: np.concatenate([chosen[name], rejected[name]], axis=1) for name in texts}

    log_ratios = zoo.spmd(lambda m, r, b: zoo.log_probs(m, b) - zoo.log_probs(r, b), mesh, out="batch seq")
    ratios = log_ratios(policy, reference, batch)
    c, d, mask = train.sum_pairs(ratios, batch)
    losses = {"sppo": "sppo", "nca": "nca_pair", "bco_pair": "bco_pair", "dpo_forward_kl": "forward_kl"}
    found = {name: LINES[line](c, d) for name, line in losses.items()}
    rows = [LINES["shorten"]({name: x[row] for name, x in batch.items()}) for row in range(8)]
    c, d, _ = train.sum_pairs(ratios, batch | {"weights": np.stack([row["weights"] for row in rows])})
    found["ld_dpo"] = objectives.dpo(c, d)
    found = {name: float((x * mask).sum() / mask.sum()) for name, x in found.items()}
    shares = LINES["weigh_tokens"](jax.tree.map(jnp.asarray, batch))
    found["dpo_with_sft"] = float(zoo.value(LINES["dpo_with_sft"], mesh)(policy, batch, reference, shares))

    texts["labels"] = (np.arange(16) < 8).astype(np.float32)[:, None]
    others = make_rows(stored, "kto/KL_") | {"labels": texts["labels"]}
    divergence = jnp.maximum(zoo.value(LINES["estimate_divergence"], mesh)(policy, others, reference), 0)
    found["kto"] = float(zoo.value(LINES["kto_loss"], mesh)(policy, texts, reference, divergence))
    assert found == pytest.approx({name: values[name]["loss"] for name in found}, rel=1e-5)
