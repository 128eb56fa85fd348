"""Modules of multi-token prediction of six families, against stored results: logits, losses, gradients, files, drafts.

The environment variable ZOO_PARITY names a folder with the cases.
"""

import json
import os
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import zoo
from zoo.layers.token_info import TokenInfo
from zoo.models import repeat_predictor
from zoo.models.predictors import predict_further

FOLDER = Path(os.environ.get("ZOO_PARITY", "")) / "models_mtp"
CASES = {
    "deepseek_v3_module": 1,
    "deepseek_v3_two_modules": 2,
    "glm4_moe_mtp": 1,
    "mimo_mtp": 1,
    "nemotron_h_mtp": 1,
    "qwen3_5_mtp": 1,
    "qwen3_next_mtp": 1,
}
"""Number of modules of each case. Qwen3.5's is used for two depths."""
AXES = {"data": 2, "fsdp": 2, "tensor": 2}
needs_parity = pytest.mark.skipif(not FOLDER.exists(), reason="ZOO_PARITY names no folder")


def load_case(name):
    meta = json.loads((FOLDER / name / "meta.json").read_text())
    model = zoo.load(FOLDER / name)
    assert len(model.predictors) == meta["modules"] == CASES[name]
    if meta["reuse"]:
        model = repeat_predictor(model, meta["depth"])
    return model, load_file(FOLDER / name / "expected.safetensors"), meta


def loss_fn(model, batch, key=None):
    return zoo.cross_entropy(model, batch, predictors=0.3)


@eqx.filter_jit
def run(model, ids):
    hidden, _ = model.hidden(ids, TokenInfo())
    states, _ = predict_further(model, ids, TokenInfo(), hidden.x)

    def mean(model):
        total, count = loss_fn(model, {"tokens": ids[:, :-1], "targets": ids[:, 1:]})
        return total / count

    loss, gradients = eqx.filter_value_and_grad(mean)(model)
    return model.logits(hidden.x), [model.logits(x) for x in states], states, loss, gradients


@needs_parity
@pytest.mark.one_case
@pytest.mark.parametrize("name", ["mimo_mtp", *(name for name in CASES if name != "mimo_mtp")])
def test_case_of_pytorch(name, tmp_path):
    model, expected, meta = load_case(name)
    ids = jnp.asarray(expected["input_ids"])
    logits, further, states, loss, gradients = run(model, ids)
    scale = np.abs(expected["logits"]).max()
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5 * scale)
    for depth in range(1, meta["depth"] + 1):
        rows = slice(None, 33 - depth)
        np.testing.assert_allclose(further[depth - 1][:, rows], expected[f"mtp_logits.{depth}"], atol=1e-5 * scale)
        np.testing.assert_allclose(states[depth - 1][:, rows], expected[f"mtp_states.{depth}"], atol=1e-4)
    np.testing.assert_allclose(loss, expected["loss_total"], rtol=1e-6)

    zoo.save(model, tmp_path / "model")
    zoo.save(gradients, tmp_path / "gradients")
    original = load_file(FOLDER / name / "model.safetensors")
    written = load_file(tmp_path / "model/model.safetensors")
    assert written.keys() == original.keys()
    assert all(written[tensor].tobytes() == x.tobytes() for tensor, x in original.items())
    config = [json.loads((path / "config.json").read_text()) for path in (FOLDER / name, tmp_path / "model")]
    assert config[0] == config[1]
    found = load_file(tmp_path / "gradients/model.safetensors")
    for tensor, norm in meta["grad_total_norm"].items():
        if tensor in found and tensor not in meta["without_gradient"]:
            np.testing.assert_allclose(np.linalg.norm(found[tensor]), norm, rtol=2e-4)
    for tensor, x in expected.items():
        if tensor.startswith("grad_total."):
            difference = found[tensor.removeprefix("grad_total.")] - x
            assert np.linalg.norm(difference) < 2e-4 * np.linalg.norm(x)

    prompt = jnp.asarray(expected["generate.prompt"])
    tokens = zoo.generate(model, prompt, max_new_tokens=16, draft="mtp", details=True)
    np.testing.assert_array_equal(tokens.tokens, expected["generate.tokens"])
    assert tokens.steps < 14


@needs_parity
@pytest.mark.one_case("slow")
@pytest.mark.parametrize("name", ["qwen3_next_mtp", *(name for name in CASES if name != "qwen3_next_mtp")])
def test_case_on_a_mesh(name):
    model, expected, _ = load_case(name)
    mesh = zoo.make_mesh(**AXES)
    ids = jnp.asarray(expected["input_ids"])
    batch = {"tokens": jnp.tile(ids[:, :-1], (2, 1)), "targets": jnp.tile(ids[:, 1:], (2, 1))}
    placed = zoo.place(model, mesh)
    loss, gradients = zoo.value_and_grad(loss_fn, mesh)(placed, batch)
    np.testing.assert_allclose(loss, expected["loss_total"], rtol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(gradients)))
    tokens = zoo.generate(placed, jnp.asarray(expected["generate.prompt"]), max_new_tokens=16, draft="mtp", mesh=mesh)
    np.testing.assert_array_equal(tokens, expected["generate.tokens"])
