"""PEFT's files of virtual tokens and token rows: which number is which, refusals, parity with PEFT (`ZOO_PARITY`)."""

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
from zoo.parallel.module import replace_option
from zoo.weights.safetensors import open_safetensors

MODELS = Path(__file__).parents[2] / "fixtures" / "models"
FOLDER = Path(os.environ.get("ZOO_PARITY", "nowhere")) / "adapters_more"
CASES = sorted(FOLDER.glob("*/meta.json"))
KEY = jax.random.key(0)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def assert_close(actual, expected, tolerance, name):
    scale = np.abs(expected).max()
    distance = np.abs(np.asarray(actual, np.float64) - expected).max()
    assert distance <= tolerance * scale, f"{name}: {distance / scale:.1e} of the scale apart"


def read(path):
    return {name: np.asarray(tensor.read()) for name, tensor in open_safetensors(path).items()}


def compute(model, tokens, virtual):
    """Return loss, logits and gradients. The last virtual token predicts the first of the text."""

    def loss(trainable):
        logits = eqx.combine(trainable, model)(tokens)
        first = max(virtual, 1)
        log_probs = jax.nn.log_softmax(logits[:, first - 1 : -1])
        return -jnp.take_along_axis(log_probs, tokens[:, first:, None], -1).mean(), logits

    return jax.value_and_grad(loss, has_aux=True)(zoo.trainable(model))


@pytest.mark.skipif(not CASES, reason="ZOO_PARITY names no folder with adapters_more")
@pytest.mark.parametrize("case", [path.parent for path in CASES] or [None], ids=lambda path: path and path.name)
def test_case_matches_peft(case, tmp_path):
    """Logits, loss, gradients, merged logits, greedy tokens with our cache, and the same bytes written back."""
    meta = json.loads((case / "meta.json").read_text())
    config = json.loads((case / "adapter" / CONFIG).read_text())
    expected = read(case / "expected.safetensors")
    base = zoo.load(FOLDER / "bases" / meta["base"], dtype="float32")
    model = adapters.load(base, case / "adapter")
    virtual = meta["virtual_tokens"] if config["peft_type"] in ("PROMPT_TUNING", "P_TUNING") else 0
    ids = jnp.broadcast_to(base.embedding.table_shape[0] + jnp.arange(virtual), (2, virtual))
    put_before = lambda tokens: jnp.concatenate([ids, tokens], axis=1)
    (loss, logits), gradients = eqx.filter_jit(compute)(model, put_before(expected["input_ids"]), virtual)
    is_subtracted = config.get("init_lora_weights") in ("pissa", "olora")  # by a decomposition of the base's weight
    tolerance = 1e-5 if is_subtracted else 2e-6
    assert_close(logits[:, virtual:], expected["logits"], tolerance, "logits")
    if virtual:
        assert_close(logits[:, :virtual], expected["logits_virtual"], 2e-6, "logits of virtual tokens")
    np.testing.assert_allclose(loss, expected["loss"], rtol=2e-6)
    frozen = config.get("num_frozen_tokens", 0)
    for name, gradient in collect_tensors(model, gradients, adapter_name="default").items():
        assert not gradient[:frozen].any()
        assert_close(gradient[frozen:], expected[f"grad.{name}"][frozen:], 3e-5, name)
    new = zoo.generate(model, put_before(expected["generate.prompt"]), max_new_tokens=16)
    np.testing.assert_array_equal(new, expected["generate.tokens"])
    if "keys.0" in expected:
        for number, block in enumerate(model.stack.iter_blocks()):
            for name, x in zip(("keys", "values"), block.values, strict=True):
                np.testing.assert_array_equal(x.value.swapaxes(0, 1), expected[f"{name}.{number}"])
    if "logits_merged" in expected:
        merged = eqx.filter_jit(adapters.merge)(model)
        assert_close(merged(expected["input_ids"]), expected["logits_merged"], tolerance, "merged logits")
    adapters.save(model, tmp_path)
    if config.get("layer_replication"):
        base = adapters.remove(model)
    again = adapters.load(base, tmp_path)
    if is_subtracted:  # saved as the update of the base, of twice the rank
        assert_close(again(expected["input_ids"]), expected["logits"], tolerance, "logits of the converted file")
        return
    assert (tmp_path / WEIGHTS).read_bytes() == (case / "adapter" / WEIGHTS).read_bytes()
    assert eqx.tree_equal(again, model)


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
    with pytest.raises(zoo.CheckpointError, match="has a trained state already"):
        adapters.load(adapters.load(base, tmp_path), tmp_path, adapter_name="second")
    recurrent = zoo.load(MODELS / "mamba2", dtype="float32")
    with pytest.raises(zoo.CheckpointError, match="keys and values, of one shape in every layer"):
        adapters.load(recurrent, tmp_path)
    with pytest.raises(zoo.CheckpointError, match="keys and values, of one shape in every layer"):
        adapters.save(adapters.state(recurrent, 3, key=KEY), tmp_path)


@pytest.mark.parametrize("with_lora", [False, True])
def test_token_rows_and_prompts_are_written_and_read(with_lora, tmp_path):
    base = zoo.load(MODELS / "llama", dtype="float32")
    model = adapters.token_rows(base, [7, 3], adapter_name="default")
    if with_lora:
        model = adapters.lora(model, rank=2, adapter_name="default", key=KEY)
    model = perturb(model)
    adapters.save(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    prefix = "base_model.model.model.embed_tokens."
    if with_lora:
        assert (config["peft_type"], config["trainable_token_indices"]) == ("LORA", [7, 3])
        name = f"{prefix}token_adapter.trainable_tokens_delta"
    else:
        assert (config["peft_type"], config["token_indices"]) == ("TRAINABLE_TOKENS", [7, 3])
        name = f"{prefix}trainable_tokens_delta"
    np.testing.assert_array_equal(read(tmp_path / WEIGHTS)[name], model.embedding.rows)
    assert eqx.tree_equal(adapters.load(base, tmp_path), model)
    key = "trainable_token_indices" if with_lora else "token_indices"
    for ids, message in (
        ([7, 7], "different ids below"),
        ([7, 10**6], "different ids below"),
        ([7], "the rows of tokens are .2, 16., expected .1, 16."),
        ({"lm_head": [7, 3]}, "trained rows are read of model.embed_tokens" if with_lora else "token_indices"),
        ([7, -1], key),
    ):
        (tmp_path / CONFIG).write_text(json.dumps({**config, key: ids}))
        with pytest.raises(zoo.CheckpointError, match=message):
            adapters.load(base, tmp_path)
    other = adapters.ia3(adapters.token_rows(base, [7]), targets="key", adapter_name="tokens")
    with pytest.raises(zoo.CheckpointError, match="rows of tokens with a LoRA, and not with IA3"):
        adapters.save(other, tmp_path)
    with pytest.raises(zoo.CheckpointError, match="hold no strength"):
        adapters.save(adapters.set_strength(model, {"default": 0.5}), tmp_path)


def test_prompt_is_written_and_read(tmp_path):
    base = zoo.load(MODELS / "llama", dtype="float32")
    model = adapters.prompt(base, 2, adapter_name="default", key=KEY)
    adapters.save(model, tmp_path)
    np.testing.assert_array_equal(read(tmp_path / WEIGHTS)["prompt_embeddings"], model.embedding.rows)
    assert eqx.tree_equal(adapters.load(base, tmp_path), model)
    scaled = eqx.tree_at(lambda model: model.embedding, base, replace_option(base.embedding, "multiplier", 2.0))
    with pytest.raises(zoo.CheckpointError, match="PEFT does not multiply virtual tokens"):
        adapters.load(scaled, tmp_path)
    begun = adapters.state(base, 2, adapter_name="default", key=KEY)
    for adapted, what in (model, "virtual tokens"), (begun, "a trained state"):
        both = adapters.lora(adapted, rank=2, adapter_name="default", key=KEY)
        with pytest.raises(zoo.CheckpointError, match=f"{what}.* and more"):
            adapters.save(both, tmp_path)
