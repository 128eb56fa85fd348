"""Build the model of a config in shapes."""

import json
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax

from .spec import Config, Family


def build_shapes(family: Family, config: Config) -> Any:
    """Return the model that `family.build` makes of a config, with `jax.ShapeDtypeStruct`s for arrays.

    Loading and saving ask for the same ones again, so that the last few are kept: they hold no array. **Raises** what
    `family.build` does.
    """
    return _build(family, json.dumps(config))


@lru_cache(maxsize=16)
def _build(family: Family, text: str) -> Any:
    return eqx.filter_eval_shape(family.build, Config(json.loads(text)), key=jax.random.key(0))
