"""Save and load round trips in every family: the same bits of every array, the same static fields, the same file."""

import dataclasses
import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import zoo
from tests.quick import mark_slow
from zoo.layers import (
    Attention,
    BiasedRouter,
    GatedMLP,
    Mamba2,
    MixtureOfExperts,
    SoftmaxRouter,
    TopSoftmaxRouter,
)
from zoo.models.hf.families import FAMILIES
from zoo.models.parameter_paths import find_differences
from zoo.ops.rotary import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, Rotary, YarnScaling
from zoo.weights.safetensors import open_safetensors
from zoo.weights.save import NoFamilyError

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
KEY = jax.random.key(0)
EACH = pytest.mark.parametrize("family", FAMILIES)
VARIED = ("llama", "gpt2", "gpt_neox", "falcon", "deepseek_v3", "gpt_oss", "mamba2", "bert")
"""Families whose files differ most: fused or split in other ways, tied, per expert, transposed. The configs of the
others are drawn by `pytest -m slow tests/weights/test_save.py`; one file of each is compared in test_parity."""

PAIRS = 4
"""RoPE pairs of a head of dim 8."""
VALUES = {
    "vocab_size": st.sampled_from([11, 16]),
    "hidden_size": st.sampled_from([16, 32]),
    "intermediate_size": st.sampled_from([12, 20]),
    "num_hidden_layers": st.sampled_from([1, 2, 3, 5]),
    "num_attention_heads": st.sampled_from([2, 4]),
    "num_key_value_heads": st.sampled_from([1, 2]),
    "head_dim": st.sampled_from([None, 8]),
    "max_position_embeddings": st.sampled_from([6, 32]),
    "sliding_window": st.sampled_from([None, 2, 5]),
    "max_window_layers": st.sampled_from([0, 1, 9]),
    "layer_types": st.none()
    | st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=5, max_size=5),
    "hidden_act": st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu"]),
    "num_experts_per_tok": st.sampled_from([1, 2]),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), st.sampled_from([4, 6])),
    "n_shared_experts": st.sampled_from([1, 2]),
    "mlp_only_layers": st.sampled_from([None, [], [0], [1, 7]]),
    "moe_layer_end_index": st.sampled_from([-1, 0]),
    "clip_qkv": st.sampled_from([None, 2, 0.5]),
    "n_group": st.sampled_from([1, 2]),
    "topk_group": st.just(1),
    "topk_method": st.sampled_from(["greedy", "group_limited_greedy"]),
    "q_lora_rank": st.sampled_from([None, 6]),
    "qk_rope_head_dim": st.just(8),
    "time_step_limit": st.sampled_from([[0.0, float("inf")], [0.01, 0.1]]),
    "time_step_rank": st.sampled_from(["auto", 3]),
    "attention_hidden_size": st.sampled_from([None, 12]),
    "rope_parameters": st.sampled_from(
        [
            {},
            {"rope_type": "linear", "factor": 2},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False},
        ]
    ),
}
"""Small values for common config keys; for the others see `values`."""


def values(default):
    """Return values for a key that is not in VALUES: both booleans, small counts, floats near the default."""
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        return st.sampled_from([1, 2, 4])
    if isinstance(default, float):
        return st.sampled_from([default, default * 2 or 0.5])
    return st.just(default)


@st.composite
def configs(draw, family):
    defaults, aliases = FAMILIES[family].defaults, FAMILIES[family].aliases
    theirs = {usual: word for word, usual in aliases.items()}
    drawn = {key: draw(VALUES.get(key, values(default)), label=key) for key, default in defaults.items()}
    if "kv_lora_rank" in drawn:  # latent attention has a key for each head
        drawn["num_key_value_heads"] = drawn["num_attention_heads"]
    if "index_topk" in drawn:  # the indexer reads the latent of queries
        drawn |= {"q_lora_rank": 8, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
    if "num_kv_shared_layers" in drawn:  # layers that reuse keys follow one of their own type
        drawn |= {"num_kv_shared_layers": 0, "rope_parameters": None, "head_dim": 8}
        drawn |= {"global_head_dim": 16} if "global_head_dim" in drawn else {}
        drawn |= {"layer_types": None, "sliding_window": 4}
    if "altup_active_idx" in drawn:  # one of the streams
        drawn |= {"altup_active_idx": draw(st.integers(0, drawn["altup_num_inputs"] - 1))}
        drawn |= {"hidden_act": "gelu_pytorch_tanh", "activation_sparsity_pattern": None}
    if "num_heads" in drawn and "expand" in drawn:  # as wide together as `expand` says
        drawn |= {"head_dim": 8, "expand": 2, "num_heads": drawn["hidden_size"] // 4}
    if "block_type" in drawn:  # the default is refused
        drawn |= {"block_type": "llama", "layer_norm_type": "rms", "rope": True}
    if "hidden_ratio" in drawn:
        drawn["hidden_act"] = "swish"
    if drawn.get("layer_types"):
        drawn["layer_types"] = drawn["layer_types"][: drawn["num_hidden_layers"]]
    if drawn.get("rope_parameters"):
        drawn["rope_parameters"] = {"rope_theta": draw(st.sampled_from([100.0, 5e5])), **drawn["rope_parameters"]}
    return {theirs.get(key, key): value for key, value in drawn.items()}


def bits(model):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(model)]


def same(one, other):
    assert bits(one) == bits(other)
    assert [*find_differences(one, other), *find_differences(other, one)] == []


def on_host(model):
    """Copy to numpy arrays, whose slices are not compiled for each shape."""
    return jax.tree.map(np.asarray, model)


def files(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def altered(module, **statics):
    """Copy a module with other static fields, bypassing its constructor."""
    new = object.__new__(type(module))
    for field in dataclasses.fields(module):
        object.__setattr__(new, field.name, statics.get(field.name, getattr(module, field.name)))
    return new


def in_blocks(model, name, **statics):
    """Alter the submodule `name` of every block."""
    where = lambda tree: [getattr(b, name) for segment in tree.stack.segments for b in segment.blocks]
    return eqx.tree_at(where, model, [altered(part, **statics) for part in where(model)])


@pytest.mark.one_case
@pytest.mark.parametrize("family", mark_slow(FAMILIES, but=VARIED))
@settings(max_examples=2)
@given(data=st.data())
def test_save_and_load_every_config_of_every_family(make, family, data):
    config = data.draw(configs(family))
    dtype = data.draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]))
    try:
        model = make(family, config, seed=data.draw(st.integers(0, 9)), dtype=dtype)
    except ValueError:
        assume(False)
    with tempfile.TemporaryDirectory() as directory:
        once, twice, more = (Path(directory) / name for name in ("once", "twice", "more"))
        zoo.save(model, once)
        loaded = zoo.load(once)
        same(loaded, model)
        assert jax.tree.structure(dataclasses.replace(loaded, origin=model.origin)) == jax.tree.structure(model)
        written = json.loads((once / CONFIG).read_text())
        assert {key: value for key, value in written.items() if key != "dtype"} == config | {"model_type": family}
        zoo.save(on_host(loaded), twice)
        assert files(twice) == files(once), "saving again gives the same files"
        match data.draw(st.sampled_from(["shards", "gradients", "dtype"])):
            case "shards":
                total = sum(x.nbytes for x in jax.tree.leaves(model))
                zoo.save(on_host(loaded), more, shard_bytes=total // 3)
                assert len(files(more)) > 4 and WHOLE not in files(more)
                assert json.loads((more / INDEX).read_text())["metadata"] == {"total_size": total}
                same(zoo.load(more), model)
            case "gradients":
                zoo.save(jax.tree.map(lambda x: -x, model), more)
                tensors, grads = open_safetensors(once / WHOLE), open_safetensors(more / WHOLE)
                assert tensors.keys() == grads.keys()
                assert all(np.array_equal(-grads[name].read(), tensors[name].read()) for name in tensors)
            case "dtype":
                to_float32 = lambda x: x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(np.float32)
                same(zoo.load(once, dtype=jnp.float32), jax.tree.map(to_float32, model))


ROTARY = {
    "none": lambda: None,
    "base": lambda: Rotary(8, base=500.0),
    "part": lambda: Rotary(4),
    "interleaved": lambda: Rotary(8, interleaved=True),
    "linear": lambda: Rotary(8, scaling=LinearScaling(2.0)),
    "dynamic": lambda: Rotary(8, scaling=DynamicScaling(2.0, 16)),
    "llama3": lambda: Rotary(8, scaling=Llama3Scaling(8.0, 1.0, 4.0, 16)),
    "yarn": lambda: Rotary(8, scaling=YarnScaling(4.0, 16, mscale=0.5, mscale_all_dim=0.7)),
    "longrope": lambda: Rotary(8, base=7.0, scaling=LongRopeScaling((1.0,) * PAIRS, (2.0, 3.0, 4.0, 5.0), 16, 4.0)),
}
OPTIONS = st.fixed_dictionaries(
    {
        "layers": st.sampled_from([1, 4]),
        "kv_heads": st.sampled_from([None, 1]),
        "qk_norm": st.booleans(),
        "windows": st.sampled_from([(None,), (4,), (4, None), (None, 4, 4), (3, 4)]),
        "soft_cap": st.sampled_from([None, None, None, 5.0]),
        "tied": st.booleans(),
        "dropout": st.sampled_from([0.0, 0.1]),
        "rotary": st.sampled_from(sorted(ROTARY)),
    }
)


def from_scratch(make=zoo.models.Transformer, **options):
    sizes = {"vocab": 11, "embed": 16, "heads": 2, "head_dim": 8, "mlp": 12, "layers": 2} | options
    shapes = eqx.filter_eval_shape(partial(make, **sizes), key=KEY)
    draw = np.random.default_rng(0)
    number = lambda x: draw.normal(size=x.shape).astype(x.dtype)
    return jax.tree.map(lambda x: number(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)


@settings(max_examples=15)
@given(options=OPTIONS)
def test_save_from_scratch_chooses_a_fitting_family(options):
    """A model that no family computes is refused with the reason."""
    model = from_scratch(**options | {"rotary": ROTARY[options["rotary"]]()})
    with tempfile.TemporaryDirectory() as directory:
        several = options["layers"] > 1 and len(set(options["windows"])) > 1
        refused = {
            "soft_cap": options["soft_cap"] is not None,
            "rotary": options["rotary"] in ("interleaved", "part"),
            "parts": several and (options["windows"] == (3, 4) or not options["qk_norm"]),
        }
        try:
            zoo.save(model, Path(directory) / "new")
        except zoo.CheckpointError as error:
            assert any(refused.values()) and any(word in str(error) for word in refused)
            assert not (Path(directory) / "new").exists()
            return
        assert not any(refused.values())
        loaded = zoo.load(Path(directory) / "new")
        same(loaded, model)
        family = loaded.origin.family.name
        windowed = options["windows"][0] is not None
        assert family == ("qwen3" if options["qk_norm"] else "mistral" if windowed else "llama")
        zoo.save(on_host(loaded), Path(directory) / "again")
        assert files(Path(directory) / "again") == files(Path(directory) / "new")


BIASED = partial(BiasedRouter, groups=2, kept_groups=1, scale=2.5)
MIXTURES = {
    "mixtral": {"windows": (5,)},
    "qwen3_moe": {"qk_norm": True, "dense_layers": 1, "dense_mlp": 20},
    "qwen3_moe as it is": {"qk_norm": True, "router": partial(SoftmaxRouter, renormalize=False)},
    "granitemoe": {"router": TopSoftmaxRouter},
    "dots1": {"router": BIASED, "shared": 24, "qk_norm": True, "windows": (None, 5), "dense_layers": 1},
    "glm4_moe": {"router": BIASED, "shared": 12},
    "glm4_moe of half heads": {"router": BIASED, "shared": 12, "qk_norm": True, "rotary": Rotary(4)},
    "a capacity": {"capacity_factor": 1.0},
    "no renormalizing": {"router": partial(SoftmaxRouter, renormalize=False)},
    "a biased router alone": {"router": BIASED},
    "no whole number of shared experts": {"router": BIASED, "shared": 30},
    "a router with a bias": {"router": partial(SoftmaxRouter, bias=True)},
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", MIXTURES)
def test_save_mixture_chooses_a_fitting_family(name, tmp_path):
    model = from_scratch(zoo.models.MixtureOfExperts, experts=4, top=2, **MIXTURES[name])
    expected = name.partition(" ")[0]
    if expected not in FAMILIES:
        with pytest.raises(zoo.CheckpointError, match="no checkpoint could be read as this model"):
            zoo.save(model, tmp_path / "t")
        return
    zoo.save(model, tmp_path / "t")
    loaded = zoo.load(tmp_path / "t")
    same(loaded, model)
    assert loaded.origin.family.name == expected
    with pytest.raises(zoo.CheckpointError, match=r"MixtureOfExperts, not GatedMLP|has 2 parts, not 1"):
        zoo.save(model, tmp_path / "dense", "qwen3")
    with pytest.raises(zoo.CheckpointError, match="none of its layers is a mixture of experts"):
        zoo.save(from_scratch(), tmp_path / "dense", expected)


def make_experts(embed, *, key):
    router, expert = partial(TopSoftmaxRouter, embed, 4, 2), partial(GatedMLP, embed, 12)
    return MixtureOfExperts(router, expert, 4, shared=partial(GatedMLP, embed, 20), key=key)


HYBRIDS = {"an MLP": {"mlp": 12}, "experts beside a shared MLP": {"ffns": [make_experts]}}


def from_pattern(epsilon=1e-5, **options):
    """Build a hybrid of Mamba-2 of two groups and attention."""
    mamba = partial(Mamba2, heads=4, head_dim=8, groups=2, state_dim=3)
    pattern = [mamba, mamba, partial(Attention, heads=4, kv_heads=2, rotary=options.pop("rotary", None))]
    return zoo.models.Hybrid(vocab=11, embed=16, layers=5, pattern=pattern, epsilon=epsilon, **options, key=KEY)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("rotary", [None, Rotary(4)])
def test_save_hybrid_as_granite(name, rotary, tmp_path):
    ffn = HYBRIDS[name]
    model = from_pattern(rotary=rotary, **ffn)
    zoo.save(model, tmp_path / "t")
    loaded = zoo.load(tmp_path / "t")
    same(loaded, model)
    assert loaded.origin.family.name == "granitemoehybrid"
    zoo.save(on_host(loaded), tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "t")


def test_save_refuses_hybrids_that_granite_lacks(tmp_path):
    save = lambda model: zoo.save(model, tmp_path / "t", "granitemoehybrid")
    with pytest.raises(zoo.CheckpointError, match="epsilon"):
        save(from_pattern(mlp=12, epsilon=1e-3))
    with pytest.raises(zoo.CheckpointError, match="its block is MixerBlock, not Block"):
        save(from_pattern())
    with pytest.raises(zoo.CheckpointError, match="none of its layers is Mamba-2"):
        save(from_scratch())


def test_save_refuses_the_name_of_a_file(tmp_path):
    (tmp_path / "notes").touch()
    for name, advice in (("x/model.safetensors", f"pass {tmp_path / 'x'}$"), ("notes", "choose another name$")):
        with pytest.raises(zoo.CheckpointError, match=f"{name} is a file: expected a directory, .*: {advice}"):
            zoo.save(from_scratch(), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_save_names_a_part_that_no_family_has(tmp_path):
    class ForgetAttention(zoo.layers.Attention):
        pass

    model = from_scratch()
    blocks = lambda model: model.stack.segments[0].blocks[0].mixer
    other = jax.tree.map(lambda x: x, blocks(model))
    object.__setattr__(other, "__class__", ForgetAttention)
    with pytest.raises(NoFamilyError, match="mixer is ForgetAttention, not Attention") as caught:
        zoo.save(eqx.tree_at(blocks, model, other), tmp_path / "t")
    assert caught.value.part == "ForgetAttention"
    assert "\n  without a family, eqx.tree_serialise_leaves(path, model) writes" in str(caught.value)
    with pytest.raises(zoo.CheckpointError, match="there is no family 'lama'") as caught:
        zoo.save(model, tmp_path / "t", "lama")
    assert not isinstance(caught.value, NoFamilyError)


def test_save_gradients_omits_buffers(tmp_path):
    model = from_scratch(zoo.models.MixtureOfExperts, experts=4, top=2, **MIXTURES["dots1"])
    zoo.save(model, tmp_path / "model")
    zoo.save(zoo.trainable(model), tmp_path / "trainable")
    all_names, trainable = (open_safetensors(tmp_path / name / WHOLE).keys() for name in ("model", "trainable"))
    assert all_names - trainable == {"model.layers.1.mlp.gate.e_score_correction_bias"} and trainable < all_names


def test_save_as_unfit_family_names_first_difference(tmp_path):
    model = from_scratch()
    for family, reason in (
        ("gemma", "is not|is .*, not"),
        ("qwen3", "query_norm is None, not RMSNorm"),
        ("qwen2", "bias is None, not an array"),
        ("gpt2", "only models that were read from such a checkpoint"),
        ("lama", "there is no family 'lama'; did you mean 'llama'?"),
    ):
        with pytest.raises(zoo.CheckpointError, match=reason.replace("?", r"\?")):
            zoo.save(model, tmp_path / "t", family)
    assert not (tmp_path / "t").exists()


def test_save_after_surgery_updates_config_or_refuses(make, tmp_path):
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    zoo.save(make("mistral", sizes | {"sliding_window": 4}), tmp_path / "mistral")
    model = on_host(zoo.load(tmp_path / "mistral"))
    for statics, key, value in (
        ({"window": None}, "sliding_window", None),
        ({"window": 7}, "sliding_window", 7),
        ({"rotary": Rotary(8, base=3.0)}, "rope_parameters", {"rope_type": "default", "rope_theta": 3.0}),
    ):
        changed = in_blocks(model, "mixer", **statics)
        zoo.save(changed, tmp_path / "changed")
        config = json.loads((tmp_path / "changed" / CONFIG).read_text())
        assert config["model_type"] == "mistral" and config[key] == value
        same(zoo.load(tmp_path / "changed"), changed)
    for changed, told in (
        (in_blocks(model, "mixer", soft_cap=3.0), "soft_cap is 3.0, not None"),
        (in_blocks(model, "mixer", scale=1.0), "scale is 1.0, not None"),
        (in_blocks(model, "mixer_norm", epsilon=0.5), "epsilon"),
        (in_blocks(model, "ffn", activation=jnp.sin), "activation"),
        (altered(model, soft_cap=30.0), "soft_cap is 30.0, not None"),
        (eqx.tree_at(lambda m: m.embedding, model, altered(model.embedding, multiplier=2.0)), "multiplier is 2.0"),
    ):
        with pytest.raises(zoo.CheckpointError, match=told):
            zoo.save(changed, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    narrow = eqx.tree_at(lambda m: m.embedding.weight, model, model.embedding.weight[:7])
    with pytest.raises(zoo.CheckpointError, match=r"head.weight has the shape \[11, 16\], not \[7, 16\]"):
        zoo.save(narrow, tmp_path / "refused")
    narrow = eqx.tree_at(lambda m: m.head.weight, narrow, model.head.weight[:7])
    zoo.save(narrow, tmp_path / "narrow")
    assert json.loads((tmp_path / "narrow" / CONFIG).read_text())["vocab_size"] == 7
    same(zoo.load(tmp_path / "narrow"), narrow)
    tied = eqx.tree_at(lambda m: m.head, model, None)
    zoo.save(tied, tmp_path / "tied")
    same(zoo.load(tmp_path / "tied"), tied)


def test_save_after_surgery_refuses_undescribed_family(make, tmp_path):
    zoo.save(make("gpt2", {"vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 6}), tmp_path / "a")
    model = zoo.load(tmp_path / "a")
    with pytest.raises(zoo.CheckpointError, match=r"read as gpt2, and .*window is 4, not None"):
        zoo.save(in_blocks(model, "mixer", window=4), tmp_path / "b")
    for unlike in (model.stack, jax.tree.leaves(model), from_scratch().stack):
        with pytest.raises(zoo.CheckpointError):
            zoo.save(unlike, tmp_path / "b", "gpt2")
    assert not (tmp_path / "b").exists()


def test_save_config_overrides(make, tmp_path):
    model = make("llama", {"vocab_size": 11, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1})
    zoo.save(model, tmp_path / "a", config={"eos_token_id": 2, "architectures": ["Mine"]})
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    assert config["eos_token_id"] == 2 and config["architectures"] == ["Mine"]
    same(zoo.load(tmp_path / "a"), model)
    for wrong in ({"rms_norm_eps": 0.5}, {"num_hidden_layers": 2}, {"vocab_size": "many"}):
        with pytest.raises(zoo.CheckpointError):
            zoo.save(model, tmp_path / "b", config=wrong)


def test_save_keeps_config_spelling_and_missing_prefix(make, tmp_path):
    """A config in the older spelling is saved in it; a checkpoint without the base prefix is saved without it."""
    older = {
        "vocab_size": 11,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "torch_dtype": "float32",
    }
    older |= {"num_attention_heads": 2, "rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    model = make("llama", older)
    zoo.save(model, tmp_path / "a")
    assert json.loads((tmp_path / "a" / CONFIG).read_text()) == older | {"model_type": "llama"}
    same(zoo.load(tmp_path / "a"), model)
    half = zoo.load(tmp_path / "a", dtype=jnp.bfloat16)
    zoo.save(half, tmp_path / "half")
    assert json.loads((tmp_path / "half" / CONFIG).read_text())["torch_dtype"] == "bfloat16"
    same(zoo.load(tmp_path / "half"), half)
    sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 6}
    model = make("gpt2", sizes)
    bare = dataclasses.replace(model, origin=dataclasses.replace(model.origin, lacks_base_prefix=True))
    zoo.save(bare, tmp_path / "bare")
    assert {"wte.weight", "h.1.attn.c_attn.bias"} <= open_safetensors(tmp_path / "bare" / WHOLE).keys()
    same(zoo.load(tmp_path / "bare"), bare)
    assert zoo.load(tmp_path / "bare").origin.lacks_base_prefix


@pytest.fixture
def two(make):
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2}
    return [make("llama", sizes | {"num_attention_heads": 2}, seed=seed) for seed in range(2)]


def test_save_removes_files_of_an_older_checkpoint(two, tmp_path):
    kept = {
        name: name.encode() for name in ("tokenizer.json", "notes.safetensors", "generation_config.json", "model.md")
    }
    kept |= {"model-of-mine.safetensors": b"not ours", "model_ema.safetensors": b"nor this"}
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    ours = {CONFIG}
    for model, size, count in (
        (two[0], 2000, 5),
        (two[1], 10**9, 1),
        (two[0], 6000, 2),
        (two[1], 2000, 5),
        (two[0], 6000, 2),
    ):
        zoo.save(model, tmp_path, shard_bytes=size)
        ours = {path.name for path in tmp_path.iterdir()} - {*kept, "README.md"}
        assert len(ours) >= count + (1 if count == 1 else 2)
        shards = sorted(name for name in ours if name.endswith(".safetensors"))
        assert ours == {CONFIG, WHOLE} if count == 1 else ours == {CONFIG, INDEX, *shards}
        if count > 1:
            assert sorted(set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())) == shards
        same(zoo.load(tmp_path), model)
        assert {name: (tmp_path / name).read_bytes() for name in kept} == kept, "other files are not touched"


CHANGES = [(10**9, 10**9), (10**9, 2000), (2000, 10**9), (2000, 6000)]


@pytest.mark.parametrize("before, after", mark_slow(CHANGES, but=[CHANGES[0], CHANGES[3]]))
def test_save_that_fails_keeps_the_old_checkpoint(two, tmp_path, monkeypatch, before, after):
    zoo.save(two[0], tmp_path, shard_bytes=before)
    there, saving = files(tmp_path), sys.modules[zoo.save.__module__]
    write = saving.write_tensors
    for fails_at in (1, 4, 9):
        calls = []

        def fail_in_the_middle(file, tensors, *, calls=calls, fails_at=fails_at):
            def failing(read):
                calls.append(read)
                if len(calls) == fails_at:
                    raise OSError("no space left on device")
                return read()

            return write(file, {k: dataclasses.replace(x, read=partial(failing, x.read)) for k, x in tensors.items()})

        monkeypatch.setattr(saving, "write_tensors", fail_in_the_middle)
        with pytest.raises(OSError, match="no space left"):
            zoo.save(two[1], tmp_path, shard_bytes=after)
        assert files(tmp_path).items() >= there.items()
        same(zoo.load(tmp_path), two[0])
    monkeypatch.undo()
    zoo.save(two[1], tmp_path, shard_bytes=before)
    assert files(tmp_path).keys() == there.keys(), "no partial files are left"
    same(zoo.load(tmp_path), two[1])


def test_save_over_the_loaded_directory(two, tmp_path):
    zoo.save(two[0], tmp_path)
    model = zoo.load(tmp_path)
    zoo.save(model, tmp_path, shard_bytes=2000)
    same(zoo.load(tmp_path), model)
    shutil.rmtree(tmp_path)
    same(model, two[0])


def test_save_mixed_dtypes(make, tmp_path):
    """float32 norms with bfloat16 matrices round-trip; a fused tensor of both dtypes is refused."""
    model = make("llama", {"vocab_size": 11, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2})
    half = zoo.cast(model, jnp.bfloat16)
    half = eqx.tree_at(lambda m: m.norm.weight, half, model.norm.weight)
    zoo.save(half, tmp_path / "mixed")
    same(zoo.load(tmp_path / "mixed"), half)
    assert json.loads((tmp_path / "mixed" / "config.json").read_text())["dtype"] == "bfloat16", "of most parameters"
    gpt2 = make("gpt2", {"vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 6})
    key = lambda m: m.stack.segments[0].blocks[0].mixer.query.weight
    mixed = eqx.tree_at(key, gpt2, key(gpt2).astype(jnp.bfloat16))
    with pytest.raises(zoo.CheckpointError, match="c_attn"):
        zoo.save(mixed, tmp_path / "fused")
