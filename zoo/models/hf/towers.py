"""Two towers in one checkpoint: a config within the config for each, and the names of both."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo.layers import Linear
from zoo.parallel import Dim

from ..encoders.towers import Similarity, TwoTowers
from .config import read_config
from .errors import ConfigError
from .kinds import Default
from .spec import Config, Family, NameMap, TensorMapping, omit, prefixed
from .values import ValueKind, optional

TOWERS = ("text_config", "vision_config")
"""Keys of the towers' configs. Older files of CLIP have them once more with `_dict` after the name, which counts."""
TABLE = ValueKind("a table of keys", lambda value: isinstance(value, Mapping))


def read_tower(config: Mapping[str, Any], family: Family, name: str) -> Config:
    """Return the config of a tower, `name` within the config. **Raises** `ConfigError` as `read_config` does."""
    given = config.get(f"{name}_dict") or config[name] or {}
    try:
        return read_config(family, omit(given, "architectures"))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _build_towers(
    text: Family, image: Family, config: Config, *, key: Key[Array, ""], scale: float, bias: float | None
) -> TwoTowers:
    """Build both towers, and projections to `projection_dim` if the config has one. The similarity starts with `scale`
    and `bias`."""
    text_key, image_key, text_projection_key, image_projection_key = jax.random.split(key, 4)
    text_config, image_config = (
        read_tower(config, family, name) for family, name in zip((text, image), TOWERS, strict=True)
    )

    def make_projection(tower: Config, key: Key[Array, ""]) -> Linear | None:
        size = config.get("projection_dim")
        if size is None:
            return None
        return Linear(tower["hidden_size"], size, in_=Dim("embed"), key=key)

    return TwoTowers(
        text=text.build(text_config, key=text_key),
        image=image.build(image_config, key=image_key),
        text_projection=make_projection(text_config, text_projection_key),
        image_projection=make_projection(image_config, image_projection_key),
        similarity=Similarity(jnp.float32(scale), None if bias is None else jnp.float32(bias)),
    )


def _map_tower_names(text: Family, image: Family, ones: int, config: Config) -> NameMap:
    """Map the names of both towers, and of what joins them: scalars have `ones` dims in files."""
    names = {}
    for family, name, ours in zip((text, image), TOWERS, ("text", "image"), strict=True):
        names.update(prefixed("", ours, family.names(read_tower(config, family, name))))
    return {
        **names,
        "text_projection": "text_projection",
        "visual_projection": "image_projection",
        "logit_scale": TensorMapping(("similarity.log_scale",), leading_ones=ones),
        "logit_bias": TensorMapping(("similarity.bias",), leading_ones=ones),
    }


def make_tower_family(
    name: str,
    architecture: str,
    text: Family,
    image: Family,
    *,
    projected: bool,
    scale: float = 2.6592,
    bias: float | None = None,
) -> Family:
    """Make the family of checkpoints with these towers.

    - `projected`: with projections to `projection_dim`. Without, scalars have one dim in files.
    - `scale`, `bias`: initial values of the similarity.
    """
    defaults: dict[str, Any] = dict.fromkeys(TOWERS, Default({}, optional(TABLE)))
    if projected:
        older = {f"{key}_dict": Default({}, optional(TABLE)) for key in TOWERS}
        defaults = {**defaults, **older, "projection_dim": 512}
    build: Callable[..., TwoTowers] = partial(_build_towers, text, image, scale=scale, bias=bias)
    return Family(
        name=name,
        architecture=architecture,
        build=build,
        names=partial(_map_tower_names, text, image, int(not projected)),
        defaults=defaults,
        ignored_keys=frozenset({"logit_scale_init_value"}),
        ignored_tensors=(r"embeddings\.position_ids$",),
    )
