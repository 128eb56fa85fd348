"""Read `rope_parameters` of a config.json in the spelling of transformers 5 and in the older one."""

from collections.abc import Mapping
from typing import Any

from .errors import ConfigError, shorten_repr, suggest_nearest
from .kinds import COUNT
from .spec import Family
from .values import BOOL, NON_NEGATIVE_NUMBER, POSITIVE_NUMBER, WORD, ValueKind, list_of

ROPE_CONFIG_KEYS = (
    *("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"),
    "original_max_position_embeddings",
)

ROPE_TYPE_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "axial": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        ),
    ),
    "proportional": ((), ("factor",)),
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "original_max_position_embeddings", "attention_factor"),
    ),
}
"""Required and optional keys of each `rope_type`. "axial" turns by row and column of a patch: only families with it as
their default read it."""

_ROPE_TYPE_SYNONYMS = {"deepseek_yarn": "yarn", "mrope": "default"}
"""Other words of files for a `rope_type`. Only words that mean the same with the same keys."""

_ROPE_FACTORS = ValueKind(
    "a list of numbers above 0", lambda value: bool(value) and list_of(POSITIVE_NUMBER).fits(value)
)
_ROPE_KINDS: Mapping[str, ValueKind] = {
    "rope_type": WORD,
    "truncate": BOOL,
    "llama_4_scaling_beta": NON_NEGATIVE_NUMBER,
    "mscale": NON_NEGATIVE_NUMBER,  # 0 is none, as in transformers
    "mscale_all_dim": NON_NEGATIVE_NUMBER,
    "short_factor": _ROPE_FACTORS,
    "long_factor": _ROPE_FACTORS,
    "mrope_section": list_of(COUNT),
    "mrope_interleaved": BOOL,
}
"""Kinds of RoPE values that are not numbers above 0."""

_ROPE_BASE_KEYS = ("rope_theta", "partial_rotary_factor")
"""Keys of every `rope_type`."""


LAYER_TYPES = ("sliding_attention", "full_attention")
"""Types of layers that may have a RoPE of their own."""
COMPRESSION_TYPES = ("main", "compress")
"""Types of RoPE of DeepSeek-V4: of layers with a window only, and of layers with compressed keys."""


def read_rope_parameters(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read canonical `rope_parameters` from either spelling, by layer type if the family's default is by layer type.

    The older spelling has one `rope_theta`, and for sliding layers another in `sliding_rope_theta`, or the family's own
    where that differs from the `rope_theta` of full layers. Its `rope_scaling` applies to full layers.

    Of DeepSeek-V4, the older spelling has `compress_rope_theta` for layers with compressed keys, to which its
    `rope_scaling` applies, without YaRN's factor of cos and sin. `qk_rope_head_dim` says how much of a head is turned.
    """
    if family.may_lack_rope and _has_null_theta(given):
        return {"rope_type": "default", "rope_theta": None}
    canonical = {family.aliases.get(key, key): value for key, value in given.items() if value is not None}
    default = family.defaults["rope_parameters"]
    if default.keys() >= set(COMPRESSION_TYPES):
        return _read_compression_ropes(family, canonical, default)
    if not default.keys() >= set(LAYER_TYPES):
        return _read_rope(family, canonical, default)
    nested = canonical.get("rope_parameters", {})
    sliding = default["sliding_attention"]
    if not isinstance(nested, Mapping) or any(not isinstance(nested.get(kind, {}), Mapping) for kind in LAYER_TYPES):
        raise ConfigError(
            f"rope_parameters = {shorten_repr(nested)} should have a table each for {' and '.join(LAYER_TYPES)}"
        )
    base = {key: value for key, value in canonical.items() if key in ROPE_CONFIG_KEYS and key != "rope_parameters"}
    if nested:
        if unknown := sorted(nested.keys() - set(LAYER_TYPES)):
            raise ConfigError(f"rope_parameters has {unknown[0]!r}, and tables here are {' and '.join(LAYER_TYPES)}")
        return {
            kind: _read_rope(family, {**base, "rope_parameters": nested.get(kind)}, default[kind]) for kind in nested
        }
    local = canonical.get("sliding_rope_theta")
    if local is None:
        is_same = sliding["rope_theta"] == default["full_attention"]["rope_theta"]
        if is_same:
            local = canonical.get("rope_theta", sliding["rope_theta"])
        else:
            local = sliding["rope_theta"]
    full = _read_rope(family, base, default["full_attention"])
    return {"sliding_attention": _read_rope(family, {"rope_theta": local}, sliding), "full_attention": full}


def _read_compression_ropes(family: Family, canonical: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Read the RoPE of layers with a window only, and of layers with compressed keys, from either spelling."""
    nested = canonical.get("rope_parameters", {})
    base = {key: value for key, value in canonical.items() if key in ("partial_rotary_factor", "rope_theta")}
    if isinstance(nested, Mapping) and all(isinstance(nested.get(kind), Mapping) for kind in COMPRESSION_TYPES):
        return {
            kind: _read_rope(family, {**base, "rope_parameters": nested[kind]}, default[kind])
            for kind in COMPRESSION_TYPES
        }
    turned = canonical.get("qk_rope_head_dim")
    if COUNT.fits(turned):
        base.setdefault("partial_rotary_factor", turned / canonical.get("head_dim", family.defaults["head_dim"]))
    theta = canonical.get("compress_rope_theta", family.defaults["compress_rope_theta"])
    scaling = canonical.get("rope_scaling") or nested
    if isinstance(scaling, Mapping) and _read_rope_type(scaling) == "yarn":
        scaling = {"attention_factor": 1.0, **scaling}
    compress = {**base, "rope_theta": theta, "rope_parameters": scaling}
    return {
        "main": _read_rope(family, base, default["main"]),
        "compress": _read_rope(family, compress, default["compress"]),
    }


def _has_null_theta(given: Mapping[str, Any]) -> bool:
    """Return True for a `rope_theta` that is stated and null."""
    stated = given.get("rope_parameters")
    if not isinstance(stated, Mapping):
        stated = given
    return "rope_theta" in stated and stated["rope_theta"] is None


def _read_rope(family: Family, canonical: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Read one RoPE from either spelling. Without any, the default applies, which may scale RoPE.

    **Raises** `ConfigError` for an unknown `rope_type`, and for missing, unknown or invalid keys.
    """
    canonical = {key: value for key, value in canonical.items() if value is not None}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(canonical.get(key, {}), Mapping):
            raise ConfigError(f"{key} = {shorten_repr(canonical[key])} should be a table of names and numbers")
    scaling = canonical.get("rope_scaling") or canonical.get("rope_parameters")
    if scaling is None:
        scaling = {key: value for key, value in default.items() if key not in _ROPE_BASE_KEYS}
    elif family.scaled_rope_theta is not None:
        default = {**default, "rope_theta": family.scaled_rope_theta}
    skipped = {"type", *family.ignored_keys}
    base_keys = [key for key in _ROPE_BASE_KEYS if key in default or key in canonical]
    rope = {key: canonical.get(key, default.get(key)) for key in base_keys}
    for key, value in scaling.items():
        if key not in skipped and value is not None:
            rope[key] = value
    original_length = canonical.get("original_max_position_embeddings")
    if original_length is not None and _read_rope_type(scaling) in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = original_length  # top level in Phi-3, where it takes precedence
    usual = "axial" if default.get("rope_type") == "axial" else "default"
    rope_type = _read_rope_type(scaling, usual)
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPE_KEYS:
        suggestion = suggest_nearest(str(rope_type), ROPE_TYPE_KEYS)
        raise ConfigError(f"rope_type = {rope_type!r} is not a known kind{suggestion}")
    if "axial" in (rope_type, usual) and rope_type != usual:
        raise ConfigError(f"rope_type = {rope_type!r}, and RoPE of {family.name} is {usual!r}")
    required, optional = ROPE_TYPE_KEYS[rope_type]
    known = {*required, *optional, *family.rope_keys, "rope_theta", "rope_type", "partial_rotary_factor"}
    partial = default.get("partial_rotary_factor")
    if partial is None and rope.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(
            f"partial_rotary_factor = {rope['partial_rotary_factor']}, and {family.name} turns all of each head"
        )
    if missing := [key for key in required if rope.get(key) is None]:
        raise ConfigError(f"rope_type {rope_type!r} needs {' and '.join(missing)}")
    if unknown := [key for key, value in rope.items() if key not in known and value is not None]:
        raise ConfigError(f"rope_type {rope_type!r} has no key {unknown[0]!r}{suggest_nearest(unknown[0], known)}")
    for key, value in rope.items():
        if error := _ROPE_KINDS.get(key, POSITIVE_NUMBER).find_error(value):
            raise ConfigError(f"{key} = {shorten_repr(value)} of rope_type {rope_type!r} {error}")
    return {**rope, "rope_type": rope_type}


def _read_rope_type(scaling: Mapping[str, Any], usual: str = "default") -> Any:
    rope_type = scaling.get("rope_type", scaling.get("type", usual))
    if isinstance(rope_type, str):
        return _ROPE_TYPE_SYNONYMS.get(rope_type, rope_type)
    return rope_type
