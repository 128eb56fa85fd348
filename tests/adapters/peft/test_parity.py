"""Parity with PEFT and PyTorch: logits, gradients, merged weights, and byte-equal files. `ZOO_PARITY` adds cases."""

import json
import os
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import mark_slow
from zoo import adapters
from zoo.adapters.peft.write import collect_tensors
from zoo.weights.safetensors import open_safetensors

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOLDER = Path(os.environ.get("ZOO_PARITY", "nowhere")) / "adapters"
OWN = [(path, path, FIXTURES / "models") for path in sorted((FIXTURES / "adapters").iterdir())]
MORE = [(path.parent, path, FOLDER / "bases") for path in sorted(FOLDER.glob("*/adapter"))]
QUICK = ("dora", "oft", "lora_embedding_alone", "lora_patterns")
CASES = mark_slow([*OWN, *MORE], but=QUICK, name=lambda case: case[0].name if case in OWN else "slow")
"""Folders of the expected results, of the adapter, and of the bases. The quick ones are those whose
products or names have least in common, of which `lora_patterns` holds what `lora` does; the others run by
`pytest -m slow tests/adapters/peft/test_parity.py`."""
REFUSED = {
    "lora_embedding_alone": "ensure_weight_tying",
}
"""Cases that raise, with the option that the error names."""
TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 2e-4


@eqx.filter_jit
def merge(model, tokens):
    """Merge the adapter, and run the merged model: compiled as one, not operation by operation."""
    merged = adapters.merge(model)
    return merged, merged(tokens)


def assert_close(actual, expected, tolerance, name):
    scale = np.abs(expected).max()
    distance = np.abs(np.asarray(actual, np.float64) - expected).max()
    assert distance <= tolerance * scale, f"{name}: {distance / scale:.1e} of the scale apart"


@pytest.mark.one_case
@pytest.mark.parametrize(("case", "adapter", "bases"), CASES, ids=lambda path: path.name)
def test_peft_case_matches_pytorch(case, adapter, bases, tmp_path):
    meta = json.loads((case / "meta.json").read_text())
    expected = {
        name: np.asarray(tensor.read()) for name, tensor in open_safetensors(case / "expected.safetensors").items()
    }
    base = zoo.load(bases / meta["base"], dtype="float32")
    if case.name in REFUSED:
        with pytest.raises(zoo.CheckpointError, match=REFUSED[case.name]):
            adapters.load(base, adapter)
        return
    model, tokens = adapters.load(base, adapter), jnp.asarray(expected["input_ids"])

    @eqx.filter_jit
    def compute(model):
        def loss(trainable):
            logits = eqx.combine(trainable, model)(tokens)
            log_probs = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1).mean(), logits

        return jax.value_and_grad(loss, has_aux=True)(zoo.trainable(model))

    (loss, logits), gradients = compute(model)
    assert_close(logits, expected["logits"], TOLERANCE, "logits")
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    on_host = partial(
        jax.tree.map, np.asarray
    )  # slices and comparisons of numpy arrays are not compiled for each shape
    gradients_by_name = collect_tensors(model, on_host(gradients), adapter_name="default")
    for name in [name for name in expected if name.startswith("grad.")]:
        gradient = gradients_by_name[name.removeprefix("grad.")].reshape(expected[name].shape)
        assert_close(gradient, expected[name], GRADIENT_TOLERANCE, name)

    merged, merged_logits = jax.device_get(merge(model, tokens))
    if "logits_merged" in expected:
        assert_close(merged_logits, expected["logits_merged"], TOLERANCE, "merged logits")
    zoo.save(merged, tmp_path / "merged")
    written = open_safetensors(tmp_path / "merged" / "model.safetensors")
    for name in [name for name in expected if name.startswith("merged.")]:
        assert_close(written[name.removeprefix("merged.")].read(), expected[name], TOLERANCE, name)

    adapters.save(model, tmp_path / "adapter")
    saved, original = (folder / "adapter_model.safetensors" for folder in (tmp_path / "adapter", adapter))
    assert saved.read_bytes() == original.read_bytes()
    assert eqx.tree_equal(on_host(adapters.load(base, tmp_path / "adapter")), on_host(model))


@pytest.mark.skipif(not FOLDER.exists(), reason="ZOO_PARITY names no folder with adapters")
def test_pissa_base_matches_peft():
    residual = {
        name: tensor.read() for name, tensor in open_safetensors(FOLDER / "pissa/residual/residual.safetensors").items()
    }
    rank = len(residual["adapter.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"])
    wrapped = adapters.lora(
        zoo.load(FOLDER / "bases/llama"), rank=rank, alpha=2 * rank, init="pissa", key=jax.random.key(0)
    )
    for field, peft_name in {"query": "q_proj", "value": "v_proj"}.items():
        base = getattr(wrapped.stack.segments[0].blocks[0].mixer, field).base.weight
        for layer in range(len(base)):
            assert_close(
                base[layer],
                residual[f"base.model.layers.{layer}.self_attn.{peft_name}.weight"],
                TOLERANCE,
                f"{peft_name} {layer}",
            )
