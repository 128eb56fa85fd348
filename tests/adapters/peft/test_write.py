"""Saving PEFT files: a round trip of every method, initial factors, and the choice of the adapter."""

import json
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import zoo
from tests.adapters.perturb import perturb
from tests.quick import mark_slow
from tests.weights.conftest import make_model as make_loaded
from zoo import adapters
from zoo.adapters.peft.source import WEIGHTS_FILE
from zoo.parallel.rounds import merge_rounds, split_rounds
from zoo.weights.safetensors import open_safetensors

METHODS = ("lora", "dora", "vera", "ia3", "loha", "lokr", "oft", "adalora")


@eqx.filter_jit
def run(model):
    return model(jnp.arange(10).reshape(2, 5))


@cache
def make_model(layers=2, embed=16, **options):
    sizes = {"vocab": 32, "embed": embed, "layers": layers, "heads": 2, "mlp": 24, **options}
    return zoo.models.Transformer(**sizes, key=jax.random.key(0))


@pytest.fixture(scope="module")
def adapted():
    return adapters.lora(make_model(), targets=("query", "down"), rank=2, key=jax.random.key(1))


@pytest.mark.parametrize("method", mark_slow(METHODS, but=("vera",)))
def test_save_and_load_round_trip(method, tmp_path):
    """LoRA, DoRA and OFT are held by test_parity.py by default: the files of PEFT, byte for byte."""
    model = make_model()
    options = {"block_size": 8} if method == "oft" else {}
    adapt = lambda model: perturb(getattr(adapters, method)(model, key=jax.random.key(1), **options))
    wrapped = eqx.filter_jit(adapt)(model)
    adapters.save(wrapped, tmp_path)
    loaded = adapters.load(model, tmp_path)
    np.testing.assert_allclose(run(loaded), run(wrapped), atol=1e-5)
    assert adapters.adapter_names(loaded) == ["default"]


@pytest.mark.parametrize("init", mark_slow(["pissa", "olora"], but=["pissa"]))
def test_save_after_pissa_or_olora_doubles_the_rank(init, tmp_path):
    """The initial output is the base's. After training, the file is for the original base, with twice the rank."""
    model = make_model()
    options = {"rank": 4, "alpha": 8, "rank_pattern": {"layers.1.attention.query": 2}}
    wrapped = adapters.lora(model, init=init, key=jax.random.key(1), **options)
    plain = run(model)
    np.testing.assert_allclose(run(wrapped), plain, atol=1e-5)
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape) * (x != 0)  # padding stays zero
    trained = eqx.combine(jax.tree.map(noise, zoo.trainable(wrapped)), wrapped)
    after = run(trained)
    assert np.abs(after - plain).max() > 0.1
    np.testing.assert_allclose(run(eqx.filter_jit(adapters.merge)(trained)), after, atol=1e-5)
    np.testing.assert_allclose(run(adapters.remove(trained)), plain, atol=1e-5)
    adapters.save(trained, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == 8 and set(config["rank_pattern"].values()) == {4}
    np.testing.assert_allclose(run(adapters.load(model, tmp_path)), after, atol=2e-5)
    with pytest.raises(ValueError, match="no 17 directions"):
        adapters.lora(model, init=init, rank=17, key=jax.random.key(1))
    with pytest.raises(ValueError, match="take a LoRA"):
        adapters.dora(model, init=init, key=jax.random.key(1))


@pytest.mark.parametrize("init", mark_slow(["pissa", "olora"], but=["pissa"]))
def test_file_of_pissa_or_olora_without_conversion(init, tmp_path):
    """A and B as they are, and the name of their initialization: PEFT takes the part of the base's weight again."""
    model = zoo.load(Path(__file__).parents[2] / "fixtures/models/llama", dtype="float32")
    options = {"rank": 4, "alpha": 8, "rank_pattern": {"layers.1.attention.query": 2}, "adapter_name": "default"}
    wrapped = adapters.lora(model, init=init, key=jax.random.key(1), **options)
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape) * (x != 0)  # padding stays zero
    trained = eqx.combine(jax.tree.map(noise, zoo.trainable(wrapped)), wrapped)
    is_lora = lambda node: isinstance(node, adapters.LoRA)
    forget = lambda node: eqx.tree_at(lambda lora: (lora.first_down, lora.first_up), node, (None, None))
    plain = jax.tree.map(lambda node: forget(node) if is_lora(node) else node, trained, is_leaf=is_lora)
    adapters.save(plain, tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "init_lora_weights": init}))
    np.testing.assert_allclose(run(adapters.load(model, tmp_path)), run(trained), atol=2e-5)
    adapters.save(adapters.dora(model, rank=2, key=jax.random.key(1)), tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "init_lora_weights": init}))
    with pytest.raises(zoo.CheckpointError, match="is read for a LoRA of a Linear"):
        adapters.load(model, tmp_path)
    gpt2 = zoo.load(Path(__file__).parents[2] / "fixtures/models/gpt2", dtype="float32")
    adapters.save(adapters.lora(gpt2, targets=["c_attn"], key=jax.random.key(1)), tmp_path)
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "init_lora_weights": init}))
    with pytest.raises(zoo.CheckpointError, match="c_attn is not one here"):
        adapters.load(gpt2, tmp_path)


@pytest.mark.parametrize("method", ["dora", "ia3"])
def test_save_of_some_parts_of_a_fused_module_leaves_the_others(method, tmp_path):
    """GPT-2's c_attn is query, key and value. The key has no adapter: its rows have the factor 1, or as magnitude
    their norm."""
    base = zoo.load(Path(__file__).parents[2] / "fixtures/models/gpt2", dtype="float32")
    options = {"inputs": None} if method == "ia3" else {"rank": 2, "key": jax.random.key(1)}
    wrapped = perturb(getattr(adapters, method)(base, targets=("query", "value"), **options))
    adapters.save(wrapped, tmp_path)
    np.testing.assert_allclose(run(adapters.load(base, tmp_path)), run(wrapped), atol=1e-5)


def test_save_names_the_base(adapted, tmp_path):
    """The argument, or else the name in the base's config.json."""
    read_name = lambda: json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"]
    adapters.save(adapted, tmp_path)
    assert read_name() is None
    adapters.save(adapted, tmp_path, base=tmp_path / "base")
    assert read_name() == str(tmp_path / "base")
    zoo.save(adapters.remove(adapted), tmp_path / "base", config={"_name_or_path": "someone/base"})
    loaded = adapters.load(zoo.load(tmp_path / "base"), tmp_path)
    adapters.save(loaded, tmp_path)
    assert read_name() == "someone/base"


def test_save_lokr_writes_the_options_of_its_shapes(adapted, tmp_path):
    """PEFT makes its own factors from rank, factor and decompose_both, and reads no others."""
    model = adapters.remove(adapted)
    read = lambda: json.loads((tmp_path / "adapter_config.json").read_text())

    def adapt(**options):
        make = lambda model: adapters.lokr(model, targets=("query", "down"), key=jax.random.key(1), **options)
        return eqx.filter_jit(make)(model)

    for factor, expected in {2: [1, 2, False], 4: [1, -1, True]}.items():  # 4 x 4 and 4 x 6 are the squarest
        adapters.save(adapt(rank=1, factor=factor, decompose_both=True), tmp_path)
        assert [read()[key] for key in ("r", "decompose_factor", "decompose_both")] == expected
    adapters.save(adapt(rank=50), tmp_path)
    assert read()["r"] >= 3 and (read()["decompose_factor"], read()["decompose_both"]) == (-1, False)
    adapters.load(model, tmp_path)


def test_save_refuses_what_peft_would_read_otherwise(adapted, tmp_path):
    base = Path(__file__).parents[2] / "fixtures/models"
    experts = adapters.dora(zoo.load(base / "gpt_oss"), targets="experts.down_proj", key=jax.random.key(1))
    with pytest.raises(zoo.CheckpointError, match="experts.down_proj holds all experts, for which PEFT has LoRA only"):
        adapters.save(experts, tmp_path)
    fused = adapters.vera(zoo.load(base / "gpt2"), targets="c_attn", rank=2, key=jax.random.key(1))
    with pytest.raises(zoo.CheckpointError, match="c_attn holds .*, and VeRA's B is not cut into theirs"):
        adapters.save(fused, tmp_path)


def test_save_dora_of_some_layers(tmp_path):
    model = make_model()
    wrapped = adapters.dora(model, targets=r"layers\.1\..*\.query", rank=2, key=jax.random.key(1))
    wrapped = eqx.combine(jax.tree.map(lambda x: 1.3 * x, zoo.trainable(wrapped)), wrapped)
    adapters.save(wrapped, tmp_path)
    expected = run(wrapped)
    np.testing.assert_allclose(run(adapters.load(model, tmp_path)), expected, atol=1e-5)
    assert np.abs(expected - run(model)).max() > 1e-3


def test_save_needs_the_name_of_one_adapter(adapted, tmp_path):
    with pytest.raises(zoo.CheckpointError, match="has no adapters"):
        adapters.save(adapters.remove(adapted), tmp_path)
    both = adapters.ia3(adapted, targets="query", inputs=None)
    with pytest.raises(zoo.CheckpointError, match="several adapters, lora, ia3: name one"):
        adapters.save(both, tmp_path)
    with pytest.raises(zoo.CheckpointError, match="no adapter 'dora'"):
        adapters.save(both, tmp_path, adapter_name="dora")
    adapters.save(both, tmp_path, adapter_name="lora")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"


@pytest.mark.slow
@pytest.mark.parametrize("modules_to_save", [(), ("mixer_norm",)])
def test_save_and_load_in_rounds_equal_one_round(modules_to_save, tmp_path):
    """The same files, and the same adapter from them."""
    model, key = make_model(layers=4), jax.random.key(1)
    adapted = perturb(adapters.lora(model, rank=2, modules_to_save=modules_to_save, key=key))
    adapters.save(adapted, tmp_path / "one")
    adapters.save(split_rounds(adapted, 2), tmp_path / "two")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
    loaded = adapters.load(split_rounds(model, 2), tmp_path / "one")
    assert eqx.tree_equal(merge_rounds(loaded), adapters.load(model, tmp_path / "one"))


@pytest.mark.parametrize("strength", [0.5, 2, 0])
def test_save_writes_the_strength_of_a_lora(strength, tmp_path):
    base = make_model()
    model = perturb(adapters.lora(base, targets=("query", "up"), rank=2, alpha=3, key=jax.random.key(1)))
    scaled = adapters.set_strength(model, {"lora": strength})
    adapters.save(scaled, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["lora_alpha"] == 3 * strength
    np.testing.assert_allclose(run(adapters.load(base, tmp_path)), run(scaled), atol=1e-6)


@pytest.mark.parametrize("add", [adapters.ia3, adapters.loha, adapters.oft])
def test_save_refuses_a_strength_without_a_factor(add, tmp_path):
    options = {adapters.ia3: {}, adapters.loha: {"rank": 2}, adapters.oft: {"block_size": 8}}[add]
    if add is not adapters.ia3:
        options["key"] = jax.random.key(1)
    model = add(make_model(), targets="query", adapter_name="mine", **options)
    with pytest.raises(zoo.CheckpointError, match="'mine' has the strength 0.5, and PEFT's files of .* hold no factor"):
        adapters.save(adapters.set_strength(model, {"mine": 0.5}), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_encoder_with_a_decoder_has_the_task_of_both(tmp_path):
    """Targets are modules of the file, of encoder and decoder; PEFT's PeftModelForSeq2SeqLM reads it."""
    base = make_loaded("t5", {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 12})
    adapted = adapters.lora(base, targets="query", rank=2, key=jax.random.key(0))
    adapters.save(adapted, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_2_SEQ_LM"
    assert sorted(config["target_modules"]) == [
        "decoder.block.0.layer.0.SelfAttention.q",
        "decoder.block.0.layer.1.EncDecAttention.q",
        "encoder.block.0.layer.0.SelfAttention.q",
    ]
    assert eqx.tree_equal(adapters.load(base, tmp_path, adapter_name="lora"), adapted)


def test_an_encoder_is_saved_without_a_task(tmp_path):
    """PEFT's class for CAUSAL_LM takes no encoder. ViT's modules in transformers 5 have other names than its tensors,
    which files for transformers 4 have."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    base = make_loaded(
        "vit", {**sizes, "image_size": 4, "patch_size": 2, "architectures": ["ViTForImageClassification"]}
    )
    adapted = adapters.lora(base, targets="query", rank=2, key=jax.random.key(0))
    adapters.save(adapted, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    [name] = config["target_modules"]
    assert config["task_type"] is None and name == "vit.layers.0.attention.q_proj"
    assert eqx.tree_equal(adapters.load(base, tmp_path, adapter_name="lora"), adapted)
    older = "vit.encoder.layer.0.attention.attention.query"
    tensors = {key.replace(name, older): x.read() for key, x in open_safetensors(tmp_path / WEIGHTS_FILE).items()}
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": [older]}))
    assert eqx.tree_equal(adapters.load(base, tmp_path, adapter_name="lora"), adapted)
