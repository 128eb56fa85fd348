"""Printed modules: public names, dims of arrays, repeated layers once, and nothing that is off or a default."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import zoo
from zoo import adapters
from zoo.models import Transformer, list_parameter_paths
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import Origin
from zoo.parallel.fields import to_snake_case
from zoo.parallel.printing import format_module

SIZES = {"vocab": 64, "embed": 32, "layers": 12, "heads": 4, "kv_heads": 2, "mlp": 48}
TRANSFORMER = """\
Decoder(
  remat='full'
  embedding: Embedding(weight: f32[vocab=64, embed=32])
  layers x 12: Block(
    mixer_norm: RMSNorm(weight: f32[embed=32])
    attention: Attention(
      head_dim=8, group=2, rotary=Rotary(dim=8)
      query: Linear(weight: f32[heads=4x8, embed=32])
      key: Linear(weight: f32[kv_heads=2x8, embed=32])
      value: Linear(weight: f32[kv_heads=2x8, embed=32])
      out: Linear(weight: f32[embed=32, heads=4x8])
    )
    ffn_norm: RMSNorm(weight: f32[embed=32])
    gated_mlp: GatedMLP(
      gate: Linear(weight: f32[mlp=48, embed=32])
      up: Linear(weight: f32[mlp=48, embed=32])
      down: Linear(weight: f32[embed=32, mlp=48])
    )
  )
  norm: RMSNorm(weight: f32[embed=32])
)"""


def make(**options):
    return eqx.filter_eval_shape(lambda: Transformer(**{**SIZES, **options}, key=jax.random.key(0)))


def make_preset(name):
    return eqx.filter_eval_shape(lambda: zoo.models.preset(name, key=jax.random.key(0)))


def test_transformer_is_printed_with_repeated_layers_once():
    assert repr(make(remat="full")) == str(make(remat="full")) == TRANSFORMER


def test_kinds_of_layers_say_what_they_share():
    printed = repr(make(windows=[8, 8, None]))
    assert "\n  layers 0-1, 3-4, 6-7, 9-10 x 8: Block(\n" in printed
    other = """\
  layers 2, 5, 8, 11 x 4: Block(
    as above: mixer_norm, ffn_norm, gated_mlp
    attention: Attention(
      head_dim=8, group=2, rotary=Rotary(dim=8)
      as above: query, key, value, out
    )
  )
"""
    assert "rotary=Rotary(dim=8), window=8\n" in printed and other in printed


def test_mixture_is_printed_with_one_of_its_experts():
    printed = repr(make_preset("deepseek-v3"))
    assert "  layers 0-2 x 3: Block(" in printed and "  layers 3-60 x 58: Block(" in printed
    assert "      experts x 256: GatedMLP(\n        gate: Linear(weight: f32[mlp=2048, embed=7168])\n" in printed
    assert "top=8, scale=2.5, groups=8, kept_groups=4\n" in printed
    assert "origin" not in printed and "Dropout" not in printed and "bias=" not in printed
    assert len(printed.splitlines()) < 60 and max(map(len, printed.splitlines())) <= 100


def test_mamba_is_printed_with_arrays_of_its_own():
    printed = repr(make_preset("mamba-130m"))
    assert "  layers x 24: MixerBlock(" in printed
    assert "      convolution: ShortConvolution(weight: f32[inner=1536, conv=4], bias: f32[inner=1536])\n" in printed
    assert "      dt_bias: f32[inner=1536], A_log: f32[inner=1536, state=16], D: f32[inner=1536]\n" in printed


def test_adapters_are_printed_with_what_they_wrap():
    model = Transformer(**{**SIZES, "layers": 2}, key=jax.random.key(0))
    options = {"targets": "query", "rank": 4, "key": jax.random.key(1)}
    printed = repr(adapters.lora(model, modules_to_save=("norm",), **options))
    expected = """\
      query: LoRA of Linear(
        weight: f32[heads=4x8, embed=32], lora.strength: f32[]
        lora.down: Linear(weight: f32[rank=4, embed=32])
        lora.up: Linear(weight: f32[heads=4x8, rank=4])
        lora.rank: i32[], lora.scale: f32[]
      )
"""
    assert expected in printed and "  norm: RMSNorm(weight: f32[embed=32] + lora)\n" in printed
    both = adapters.lora(adapters.dora(model, **options), adapter_name="french", **options)
    assert "query: LoRA of DoRA of Linear(" in repr(both) and "        french.down: Linear(" in repr(both)
    assert "query: Int8Linear(codes: i8[heads=4x8, embed=32], scales: f32[heads=4x8])" in repr(
        adapters.quantize(model, "int8")
    )


@pytest.mark.parametrize("name", ["qwen3-0.6b", "deepseek-v3", "mamba2-130m", "gpt2", "gpt-oss-20b"])
def test_printed_names_are_the_words_of_parameter_paths(name):
    model = make_preset(name)
    printed = repr(model)
    words = {word for path in list_parameter_paths(model) for word in path.name.split(".") if word != "*"}
    assert [word for word in words if word not in printed] == []


def test_trees_of_other_leaves_are_printed():
    model = Transformer(**{**SIZES, "layers": 2}, key=jax.random.key(0))
    assert "gate: Linear(weight: True)" in repr(jax.tree.map(lambda _: True, model))
    assert "layers x 2: Block(" in repr(optax.sgd(0.1, momentum=0.9).init(zoo.trainable(model)))
    assert "lora.down: Linear(weight: f32[rank=4" in repr(
        zoo.trainable(adapters.lora(model, targets="query", rank=4, key=jax.random.key(1)))
    )
    assert repr(jax.tree.map(lambda _: None, model.norm)) == "RMSNorm()"
    block = model.stack.segments[0].blocks[0]
    assert "query: Linear(weight: f32[2, 32, 32])" in repr(block), "an array of stacked layers outside of the stack"


def test_tracers_are_printed():
    seen = []
    jax.make_jaxpr(lambda norm: seen.append(repr(norm)) or 0)(zoo.layers.RMSNorm(8))
    assert seen == ["RMSNorm(weight: f32[embed=8])"]


def test_dtype_and_settings_are_printed():
    linear = zoo.cast(zoo.layers.Linear(8, 4, bias=True, key=jax.random.key(0)), jnp.bfloat16)
    assert repr(linear) == "Linear(weight: bf16[out=4, in=8], bias: bf16[out=4])"
    assert repr(zoo.layers.RMSNorm(8, epsilon=1e-3)) == "RMSNorm(weight: f32[embed=8], epsilon=0.001)"


def test_equinox_still_prints_every_field():
    printed = eqx.tree_pformat(zoo.layers.RMSNorm(8))
    assert printed == "RMSNorm(weight=f32[8], features=Dim(name='embed'), epsilon=1e-06, offset=0.0)"
    assert "implementation='auto'" in eqx.tree_pformat(make())


def test_notebooks_fold_modules():
    page = make()._repr_html_()
    assert page.count("<details open>") == page.count("</details>") > 10
    assert "<summary>layers x 12: Block</summary>" in page
    assert "<div>weight: f32[vocab=64, embed=32]</div>" in page


def test_origin_is_printed_by_its_family():
    assert repr(Origin(FAMILIES["qwen3"], "{}")) == "Origin(qwen3)"


def test_format_module_of_a_part():
    assert format_module(make().norm) == "RMSNorm(weight: f32[embed=32])"


@pytest.mark.parametrize(
    "name, expected",
    [("GatedMLP", "gated_mlp"), ("MLP", "mlp"), ("Attention", "attention"), ("GatedDeltaNet", "gated_delta_net")],
)
def test_to_snake_case(name, expected):
    assert to_snake_case(name) == expected
