"""PEFT's files of virtual tokens: which number is which, what is refused, and parity with PEFT (`ZOO_PARITY`)."""

import json
import os
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.adapters.peft.write import collect_tensors
from zoo.weights.safetensors import open_safetensors

MODELS = Path(__file__).parents[2] / "fixtures" / "models"
FOLDER = Path(os.environ.get("ZOO_PARITY", "nowhere")) / "adapters_more"
KINDS = ("PREFIX_TUNING", "CARTRIDGE")
CASES = [path for path in sorted(FOLDER.glob("*/meta.json")) if json.loads(path.read_text())["peft_type"] in KINDS]
KEY = jax.random.key(0)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def assert_close(actual, expected, tolerance, name):
    scale = np.abs(expected).max()
    distance = np.abs(np.asarray(actual, np.float64) - expected).max()
    assert distance <= tolerance * scale, f"{name}: {distance / scale:.1e} of the scale apart"


def read(path):
    return {name: np.asarray(tensor.read()) for name, tensor in open_safetensors(path).items()}


@pytest.mark.skipif(not CASES, reason="ZOO_PARITY names no folder with adapters_more")
@pytest.mark.parametrize("case", [path.parent for path in CASES] or [None], ids=lambda path: path and path.name)
def test_virtual_tokens_match_peft(case, tmp_path):
    """Logits, loss, gradient, greedy tokens with our cache, and the same bytes written back."""
    meta = json.loads((case / "meta.json").read_text())
    expected = read(case / "expected.safetensors")
    base = zoo.load(FOLDER / "bases" / meta["base"], dtype="float32")
    model, tokens = adapters.load(base, case / "adapter"), jnp.asarray(expected["input_ids"])

    @eqx.filter_jit
    def compute(model):
        def loss(trainable):
            logits = eqx.combine(trainable, model)(tokens)
            log_probs = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1).mean(), logits

        return jax.value_and_grad(loss, has_aux=True)(zoo.trainable(model))

    (loss, logits), gradients = compute(model)
    assert_close(logits, expected["logits"], 2e-6, "logits")
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-6)
    (gradient,) = collect_tensors(model, gradients, adapter_name="default").values()
    frozen = json.loads((case / "adapter" / CONFIG).read_text()).get("num_frozen_tokens", 0)
    assert not gradient[:frozen].any()
    assert_close(gradient[frozen:], expected["grad.prompt_embeddings"][frozen:], 3e-5, "gradient")
    new = zoo.generate(model, jnp.asarray(expected["generate.prompt"]), max_new_tokens=16)
    np.testing.assert_array_equal(new, expected["generate.tokens"])
    for number, block in enumerate(model.stack.iter_blocks()):
        for name, x in zip(("keys", "values"), block.values, strict=True):
            np.testing.assert_array_equal(x.value.swapaxes(0, 1), expected[f"{name}.{number}"])
    adapters.save(model, tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == (case / "adapter" / WEIGHTS).read_bytes()
    assert eqx.tree_equal(adapters.load(base, tmp_path), model)


@pytest.mark.parametrize("frozen", [0, 1])
def test_prefix_is_written_token_by_token(frozen, tmp_path):
    """[tokens, layers, key or value, KV heads, head dim], all tokens, whether they are trained or not."""
    base = zoo.load(MODELS / "llama", dtype="float32")
    model = perturb(adapters.state(base, 3, frozen=frozen, key=KEY))
    adapters.save(model, tmp_path)
    (array,) = read(tmp_path / WEIGHTS).values()
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["peft_type"] == ("CARTRIDGE" if frozen else "PREFIX_TUNING")
    blocks = list(model.stack.iter_blocks())
    heads, size = config["num_attention_heads"], config["token_dim"] // config["num_attention_heads"]
    assert (config["num_virtual_tokens"], config["num_layers"]) == (3, len(blocks))
    parts = array.reshape(3, len(blocks), 2, heads, size)
    for number, block in enumerate(blocks):
        key, value = (x.value for x in block.values)
        np.testing.assert_array_equal(parts[:, number, 0], key)
        np.testing.assert_array_equal(parts[:, number, 1], value)
    loaded = adapters.load(base, tmp_path, adapter_name="state")
    assert eqx.tree_equal(loaded, model)


def test_files_that_do_not_fit_are_refused(tmp_path):
    base = zoo.load(MODELS / "llama", dtype="float32")
    adapters.save(adapters.state(base, 3, key=KEY), tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    for change, message in (
        ({"num_virtual_tokens": 2}, "prompt_embeddings is .3, .* where num_virtual_tokens = 2 and the model has 2 la"),
        ({"num_virtual_tokens": 0}, "num_virtual_tokens = 0"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules = 2 is not computed here"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"num_frozen_tokens": 1}, "the key 'num_frozen_tokens' is not known"),
    ):
        (tmp_path / CONFIG).write_text(json.dumps({**config, **change}))
        with pytest.raises(zoo.CheckpointError, match=message):
            adapters.load(base, tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    recurrent = zoo.load(MODELS / "mamba2", dtype="float32")
    with pytest.raises(zoo.CheckpointError, match="keys and values, of one shape in every layer"):
        adapters.load(recurrent, tmp_path)
    with pytest.raises(zoo.CheckpointError, match="keys and values, of one shape in every layer"):
        adapters.save(adapters.state(recurrent, 3, key=KEY), tmp_path)
