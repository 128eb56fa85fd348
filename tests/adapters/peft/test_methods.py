"""The table of PEFT's methods: complete, the same in both directions, and no method divided that cannot be."""

from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

import zoo
from zoo import adapters
from zoo.adapters.methods.ia3 import IA3
from zoo.adapters.methods.lycoris import LoKr
from zoo.adapters.methods.oft import OFT
from zoo.adapters.peft import config
from zoo.adapters.peft.methods import METHODS, find_factor_shapes, list_peft_tensors
from zoo.layers import Linear

MODELS = Path(__file__).parents[2] / "fixtures/models"


def test_every_method_that_is_read_has_an_entry():
    virtual = {
        "PREFIX_TUNING",
        "CARTRIDGE",
        "PROMPT_TUNING",
        "P_TUNING",
        "TRAINABLE_TOKENS",
    }  # zoo.adapters.peft.prompts
    assert {method.peft_type for method in METHODS.values()} | virtual == set(config._METHODS)


@pytest.mark.parametrize("method", METHODS.values(), ids=[adapter.__name__ for adapter in METHODS])
def test_layouts_of_tensors_are_inverse(method):
    for tensor in method.tensors:
        field = np.arange(3.0) if tensor.added_dim is not None else np.arange(6.0).reshape(2, 3)
        there = tensor.to_peft(field)
        assert there.ndim == 2
        np.testing.assert_array_equal(tensor.from_peft(there), field)


def test_tensors_of_an_adapter_are_those_of_its_form():
    """IA3 and OFT have two forms of one tensor, and LoKr two of each factor."""
    base = eqx.filter_eval_shape(Linear, 16, 12, key=jax.random.key(0))
    make = lambda method, **options: eqx.filter_eval_shape(lambda base: method(base, **options), base)
    fields = lambda adapter: [tensor.field for tensor in list_peft_tensors(adapter)]
    assert fields(make(IA3, inputs=True)) == ["of_in"]
    assert fields(make(OFT, block_size=4, shared=True)) == ["shared"]
    lokr = make(LoKr, rank=1, scale=1.0, factor=4, key=jax.random.key(0))
    assert fields(lokr) == ["left", "right_up", "right_down"]
    with pytest.raises(NotImplementedError, match="Linear has no form in PEFT's files"):
        list_peft_tensors(base)


def test_lokr_of_peft_keeps_a_factor_that_is_the_larger_one():
    """LyCORIS would put the smaller number first."""
    assert find_factor_shapes(16, 20, rank=8, factor=8, both=False) == {"left": (8, 4), "right": (2, 5)}
    assert find_factor_shapes(16, 20, rank=1, factor=-1, both=True) == {
        "left_up": (4, 1),
        "left_down": (1, 4),
        "right_up": (4, 1),
        "right_down": (1, 5),
    }


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("lokr", {}, "c_attn holds .*query.*, and a Kronecker product is not cut into theirs"),
        ("oft", {"block_size": 4}, "c_attn is one module .* whose OFT would also change .*key, .*value: target all"),
    ],
)
def test_save_of_one_part_of_a_fused_module_raises(method, options, message, tmp_path):
    """PEFT's files would hold an adapter of all three."""
    model = zoo.load(MODELS / "gpt2", dtype="float32")
    adapted = getattr(adapters, method)(model, targets="query", key=jax.random.key(0), **options)
    with pytest.raises(zoo.CheckpointError, match=message):
        adapters.save(adapted, tmp_path)
