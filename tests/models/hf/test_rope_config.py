"""RoPE of every family is read in every spelling, and each of its parameters is honored."""

import jax
import pytest

from tests.quick import mark_slow
from zoo.layers import AbstractMixer
from zoo.models.hf.config import read_config
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.rope_config import ROPE_TYPE_KEYS
from zoo.models.parameter_paths import find_differences
from zoo.ops.rotary import ReversedRotation, YarnScaling

from .configs import ANOTHER, HAS_ROPE_BY_TYPE, ROTARY_FAMILIES, alias_of, build, small

ROTARY = pytest.mark.parametrize("family", ROTARY_FAMILIES, ids=str)
QUICK = ("llama", "deepseek_v3", "gpt_neox")
ROTARY_AT_LENGTH = pytest.mark.parametrize(
    "family", mark_slow(ROTARY_FAMILIES, but=QUICK, name=lambda family: family.name), ids=str
)
"""`pytest -m slow tests/models/hf` runs the other families: they read rope_parameters with the same function."""
REFUSED = [("qwen4_exp_text", kind) for kind in ("dynamic", "longrope")]
"""Kinds that depend on the length of a text, which turns keys of blocks once."""
SCALINGS = [
    {},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 16, "truncate": False},
    {"rope_type": "longrope", "short_factor": 1.5, "long_factor": 2.5},
]


def rotary_of(model):
    """Return the RoPE of the first layer that has one."""
    mixers = jax.tree.leaves(tuple(model.stack.iter_blocks()), is_leaf=lambda x: isinstance(x, AbstractMixer))
    return next(mixer.rotary for mixer in mixers if hasattr(mixer, "rotary"))


def expand_factors(family, scaling):
    """Repeat LongRoPE factors for each rotated pair of this family."""
    pairs = rotary_of(build(family, small(family))).dim // 2
    repeat = lambda key, value: [value] * pairs if key in ("short_factor", "long_factor") else value
    return {key: repeat(key, value) for key, value in scaling.items()}


def list_spellings():
    """Yield every family with one kind of scaling in turn, and a few families with all kinds; the rest is slow."""
    for number, family in enumerate(ROTARY_FAMILIES):
        for turn, scaling in enumerate(SCALINGS):
            quick = number % len(SCALINGS) == turn or family.name in ("llama", "deepseek_v3")
            kind = scaling.get("rope_type", "default")
            if (family.name, kind) in REFUSED:
                continue
            name = f"{family.name}-{kind}"
            yield pytest.param(family, scaling, id=name, marks=() if quick else pytest.mark.slow)


@pytest.mark.one_case
@pytest.mark.parametrize("family, scaling", list(list_spellings()))
def test_config_spellings_of_rope_are_equal(family, scaling):
    """transformers 5 writes `rope_parameters`, older files `rope_theta` and `rope_scaling`."""
    base, scaling = alias_of(family, "rope_theta"), expand_factors(family, scaling)
    usual = family.defaults["rope_parameters"].get("rope_type", "default")
    parameters = {"rope_theta": 500.0} | {key: value for key, value in scaling.items() if key != "rope_type"}
    kind = scaling.get("rope_type", "default")
    new = read_config(family, {"rope_parameters": parameters | {"rope_type": kind}})
    without = {key: value for key, value in parameters.items() if key != "rope_theta"}
    for type_key in ("type", "rope_type"):
        for older in [without | {type_key: kind}] + ([None, {}] if kind == usual == "default" else []):
            assert read_config(family, {base: 500.0, "rope_scaling": older}) == new
    assert new["rope_parameters"]["rope_theta"] == 500.0 and new["rope_parameters"]["rope_type"] == kind
    nulls = dict.fromkeys(
        {key for needed, possible in ROPE_TYPE_KEYS.values() for key in (*needed, *possible)} - parameters.keys()
    )
    assert read_config(family, {"rope_parameters": nulls | parameters | {"rope_type": kind}}) == new, (
        "null equals absent"
    )
    model = build(family, small(family) | {"rope_parameters": parameters | {"rope_type": kind}})
    rotary = rotary_of(model)
    assert rotary.base == 500.0
    scaling = rotary.scaling.scaling if isinstance(rotary.scaling, ReversedRotation) else rotary.scaling
    assert type(scaling).__name__.removesuffix("Scaling").lower() == ("nonetype" if kind == "default" else kind)


@pytest.mark.parametrize("family", HAS_ROPE_BY_TYPE, ids=str)
def test_config_rope_of_each_layer_type_is_read_and_honored(family):
    """Older files have one `rope_theta` and the scaling of full layers."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    sliding = family.defaults["rope_parameters"]["sliding_attention"]["rope_theta"]
    same = sliding == family.defaults["rope_parameters"]["full_attention"]["rope_theta"]
    sliding = {"rope_theta": 500.0 if same else sliding}
    tables = {"full_attention": yarn | {"rope_theta": 500.0}, "sliding_attention": sliding}
    new = read_config(family, {"rope_parameters": tables})
    assert new == read_config(family, {"rope_theta": 500.0, "rope_scaling": yarn})
    assert new["rope_parameters"]["full_attention"]["rope_type"] == "yarn"
    given = small(family, layer_types=ANOTHER["layer_types"], sliding_window=4)
    first, *_, last = build(family, given | {"rope_parameters": tables}).stack.iter_blocks()
    assert first.mixer.rotary.scaling is None and isinstance(last.mixer.rotary.scaling, YarnScaling)
    assert (first.mixer.rotary.base, last.mixer.rotary.base) == (sliding["rope_theta"], 500.0)
    for wrong in ({"full": yarn}, {"full_attention": 3}, yarn):
        with pytest.raises(ConfigError, match="rope_parameters"):
            read_config(family, {"rope_parameters": wrong})


@pytest.mark.one_case
@ROTARY_AT_LENGTH
def test_config_rope_scaling_parameters_change_the_model(family):
    for scaling in (expand_factors(family, scaling) for scaling in SCALINGS[1:]):
        given = small(family) | {"rope_parameters": {"rope_theta": 500.0} | scaling}
        for key, value in scaling.items():
            other = {bool: lambda x: not x, list: lambda x: [2 * y for y in x]}.get(type(value), lambda x: 2 * x)
            if key != "rope_type":
                changed = given | {"rope_parameters": given["rope_parameters"] | {key: other(value)}}
                assert any(find_differences(build(family, changed), build(family, given))), (scaling, key)


def test_config_phimoe_scales_of_cos_and_sin():
    """Phi-3.5-MoE's files have two, for LongRoPE, and class and files give the same number for both."""
    family = FAMILIES["phimoe"]
    rope = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.5] * 8}
    given = small(family) | {"original_max_position_embeddings": 8}
    model = build(family, given | {"rope_scaling": rope | {"short_mscale": 1.25, "long_mscale": 1.25}})
    assert next(model.stack.iter_blocks()).mixer.rotary.scaling.magnitude == 1.25
    for wrong in (
        rope | {"short_mscale": 1.25},
        {"type": "linear", "factor": 2.0, "short_mscale": 1, "long_mscale": 1},
    ):
        with pytest.raises(ConfigError, match="short_mscale = .* one number for both is computed here"):
            build(family, given | {"rope_scaling": wrong})
    with pytest.raises(ConfigError, match="has no key 'short_mscale'"):
        read_config(FAMILIES["phi3"], {"rope_scaling": rope | {"short_mscale": 1.25}})


def test_magnitude_of_rope_is_undone_by_the_norm_after_it():
    """nanochat's norm of queries and keys, computed here before the rotation, comes after it in transformers."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
    model = build(FAMILIES["nanochat"], small(FAMILIES["nanochat"]) | {"rope_parameters": yarn, "rms_norm_eps": 0.5})
    rotary = rotary_of(model)
    frequencies, magnitude = rotary.scaling(rotary.dim, rotary.base, 9)
    wanted, other = rotary.scaling.scaling(rotary.dim, rotary.base, 9)
    assert magnitude == 1.0 < other and (frequencies == -wanted).all()
    assert next(model.stack.iter_blocks()).mixer.query_norm.epsilon == 0.5 / other**2  # m x / rms(m x), in terms of x


def test_config_yarn_scale_of_0_is_none():
    """transformers asks whether both are true."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    given = small(FAMILIES["llama"])
    without = rotary_of(build(FAMILIES["llama"], given | {"rope_scaling": yarn}))
    zero = rotary_of(build(FAMILIES["llama"], given | {"rope_scaling": yarn | {"mscale": 0, "mscale_all_dim": 0.5}}))
    assert zero.scaling.magnitude == without.scaling.magnitude > 1
