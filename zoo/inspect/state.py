"""How much a model remembers of a text while it decodes."""

import equinox as eqx
import jax

from zoo.models import Decoder


def state_bytes(model: Decoder, length: int) -> int:
    """Bytes of the states that one row of up to `length` tokens leaves to remember, of a model or of its shapes alone:
    with attention a slot a token, with recurrences the same for any length."""
    states = eqx.filter_eval_shape(lambda model: model.init_state(1, length), model)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
