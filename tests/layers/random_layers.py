"""Random layers and activations, drawn by numpy, which compiles nothing; and the list of all mixers."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo.layers import AbstractMixer


def randomize(factory: Callable[..., Any], *, seed: int = 0, power: float = -0.5) -> Any:
    """Call `factory(key=)` and draw every parameter from a normal distribution with standard deviation
    in_size ** power: biases and norm weights as well, which are initialized to constants."""
    shapes = eqx.filter_eval_shape(factory, key=jax.random.key(0))
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) * x.shape[-1] ** power, x.dtype)
    return jax.tree.map(lambda x: draw(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)


def activations(*shape: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
    """Return max |actual - expected| / max |expected|."""
    return float(jnp.abs(actual - expected).max() / jnp.abs(expected).max())


def list_mixers() -> set[type[AbstractMixer]]:
    """Return the classes of mixers of the library: those of `zoo.layers`, and those of families."""

    def list_subclasses(cls: type) -> Iterator[type]:
        for subclass in cls.__subclasses__():
            yield subclass
            yield from list_subclasses(subclass)

    classes = list_subclasses(AbstractMixer)
    return {cls for cls in classes if cls.__module__.startswith("zoo.") and not inspect.isabstract(cls)}
