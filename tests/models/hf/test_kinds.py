"""Kinds of config values: kinds of defaults, kinds that stand beside one, and defaults that do not tell."""

import dataclasses

import pytest

from zoo.models.hf.families import FAMILIES
from zoo.models.hf.kinds import (
    MXFP4,
    Default,
    get_kind,
    non_negative,
    optional_count,
    optional_layer_numbers,
    optional_non_negative,
    optional_number,
    optional_words,
)

CASES = {
    "int": (4, (1, 4), (0, -1, True, 1.0, None, "4")),
    "bool": (False, (True, False), (0, 1, None, "false")),
    "float": (1.0, (-1.0, 0, 2), (True, None, "1", float("inf"))),
    "str": ("silu", ("", "gelu"), (None, 1)),
    "optional_count": (optional_count(8), (None, 1), (0, True, 1.5)),
    "non_negative": (non_negative(2), (0, 1), (None, -1, False)),
    "optional_non_negative": (optional_non_negative(), (None, 0), (-1, False)),
    "optional_number": (optional_number(30.0), (None, 1, 0.5), (0, -1.0, True)),
    "optional_words": (optional_words(), (None, [], ["a"]), ("a", [1])),
    "optional_layer_numbers": (optional_layer_numbers(), (None, [0, 3]), (0, [-1], [True])),
    "mxfp4": (Default(None, MXFP4), (None, {"quant_method": "mxfp4"}), ({"quant_method": "fp8"}, {}, False)),
}


@pytest.mark.parametrize(("default", "right", "wrong"), CASES.values(), ids=CASES)
def test_kind_of_a_default(default, right, wrong):
    kind = get_kind("key", default)
    assert [value for value in right if kind.find_error(value)] == []
    assert [value for value in wrong if not kind.find_error(value)] == []


def test_epsilon_is_not_negative():
    assert get_kind("rms_norm_eps", 1e-6).find_error(-1e-6) and not get_kind("rms_norm_eps", 1e-6).find_error(0)
    assert not get_kind("scale", 1e-6).find_error(-1e-6)


def test_default_that_does_not_tell_is_refused_with_the_family():
    with pytest.raises(ValueError, match=r"None of head_dim does not tell .* optional_count\(\)"):
        dataclasses.replace(FAMILIES["llama"], defaults={"head_dim": None}, kinds={})


def test_family_has_plain_defaults_and_declares_kinds():
    llama = FAMILIES["llama"]
    assert llama.defaults["num_key_value_heads"] is None and llama.kinds["num_key_value_heads"].find_error(0)
    other = dataclasses.replace(llama, defaults={**llama.declared, "rank": 4}, kinds={})
    assert other.defaults == {**llama.defaults, "rank": 4}
    assert other.kinds == {**llama.kinds, "rank": other.kinds["rank"]}
    assert dataclasses.replace(llama, name="copy").kinds == llama.kinds
