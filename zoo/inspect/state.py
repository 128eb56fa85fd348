"""Memory of decoding states: KV caches and recurrent states."""

import equinox as eqx
import jax

from zoo.models import Decoder


def state_bytes(model: Decoder, length: int) -> int:
    """Count the bytes of the decoding states of one row of up to `length` tokens, for a model or a model of
    `jax.ShapeDtypeStruct`s. KV caches of attention grow with `length`, recurrent states do not."""
    states = eqx.filter_eval_shape(lambda model: model.init_state(1, length), model)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
