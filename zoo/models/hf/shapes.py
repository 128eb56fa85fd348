"""Build the model of a config in shapes."""

import dataclasses
import json
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax

from .predictors import build_model
from .spec import Config, Family


def build_shapes(family: Family, config: Config) -> Any:
    """Return the model that `build_model` makes of a config, with `jax.ShapeDtypeStruct`s for arrays.

    Loading and saving ask for the same ones again, so that the last few are kept: they hold no array. **Raises** what
    `family.build` does.
    """
    text = json.dumps(config, default=repr)
    return _build(_Request(family, text, config))


@dataclasses.dataclass(frozen=True)
class _Request:
    """Inputs that determine the shapes of a model."""

    family: Family
    text: str
    config: Config = dataclasses.field(compare=False)


@lru_cache(maxsize=16)
def _build(request: _Request) -> Any:
    return eqx.filter_eval_shape(build_model, request.family, request.config, key=jax.random.key(0))
