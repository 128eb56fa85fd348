"""Mixers, blocks and decoders behind one call, which the checks run."""

import abc
import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.layers import AbstractMixer, TokenInfo
from zoo.layers.abstract import check_sequence_sharding
from zoo.layers.attention.sparse_latent import DIVERGENCE
from zoo.models import Decoder, Hidden, list_parameter_paths
from zoo.models.capture import refuse_edits
from zoo.models.decoder import AbstractBlock
from zoo.models.parameter_paths import list_modules
from zoo.ops.platform import current_platform
from zoo.parallel import Module, all_gather, gather, leaves
from zoo.parallel.fields import IMPLEMENTATION_OPTION
from zoo.parallel.module import find_operations, replace_option, trainable
from zoo.shapes import HiddenStates

_IS_SLOW = "kernels run in Pallas' interpreter on a CPU, and take minutes: pass implementations= with"

_Outputs = Float[Array, "batch seq _"]


class Subject(Module):
    """A sequence model `(x, info, state) -> (y, state)` over hidden states, on one device or inside `zoo.spmd`."""

    module: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def __call__(self, x: HiddenStates, info: TokenInfo, state: Any = None) -> tuple[_Outputs, Any]: ...

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any: ...


class MixerSubject(Subject):
    """A mixer by itself."""

    module: AbstractMixer

    def __call__(self, x, info, state=None):
        check_sequence_sharding(self.module, x)
        return gather(self.module)(x, info, state)

    def init_state(self, batch, length, dtype=jnp.float32):
        return gather(self.module).init_state(batch, length, dtype)


class BlockSubject(Subject):
    """A block: mixer, feed-forward layer and residuals."""

    module: AbstractBlock

    def __call__(self, x, info, state=None):
        check_sequence_sharding(self.module, x)
        hidden, state = gather(self.module)(Hidden(x), info, state)
        return hidden.x, state

    def init_state(self, batch, length, dtype=jnp.float32):
        return gather(self.module).init_state(batch, length, dtype)


class DecoderSubject(Subject):
    """A decoder from the first layer's input to the logits. Every token has one id, and `x` is added to its embedding,
    in each residual stream: gradients with respect to `x` then tell which token an output depends on, and learned
    positions count."""

    module: Decoder

    def __call__(self, x, info, state=None):
        model = self.module
        hidden = model.embed(jnp.ones_like(x[..., 0], int), info)
        check_sequence_sharding(model.stack, hidden.x)
        x = jnp.tile(x, hidden.x.shape[-1] // x.shape[-1])
        hidden = dataclasses.replace(hidden, x=(hidden.x + x).astype(hidden.x.dtype))
        hidden, state = model.stack(hidden, info, state)
        return all_gather(model.logits(gather(model.norm)(hidden.x)), "vocab", 2), state

    def init_state(self, batch, length, dtype=jnp.float32):
        return self.module.init_state(batch, length)


def make_subject(module: Any) -> Subject:
    """Wrap a module. **Raises** `TypeError` for a module that is not a mixer, block or decoder, `ValueError` for a
    decoder with edits (`zoo.patch`)."""
    if isinstance(module, AbstractMixer):
        return MixerSubject(module)
    if isinstance(module, AbstractBlock):
        return BlockSubject(module)
    if isinstance(module, Decoder):
        refuse_edits(module, "a check of a decoder")
        return DecoderSubject(module)
    raise TypeError(f"make(key=) returns a mixer, a block or a Decoder, and returned {type(module).__name__}")


def find_embed_size(subject: Subject) -> int:
    """Read the size of `embed` off a parameter. **Raises** `ValueError` if none has this dim."""
    for leaf, x in zip(leaves(subject), jax.tree.leaves(subject), strict=True):
        for dim, size in zip(leaf.dims or (), x.shape, strict=True):
            if dim.name == "embed":
                return size
    raise ValueError("no parameter has the dim embed, whose size the inputs need: pass embed=")


def list_trainable_names(subject: Subject) -> list[str]:
    """Return the paths of the trainable parameters, in the order of `jax.tree.leaves`."""
    return [path.name.removeprefix("module.") for path in list_parameter_paths(trainable(subject))]


def list_divergences(subject: Subject) -> tuple[str, ...]:
    """Return the names of the values by which indexers learn (`zoo.models.indexer_loss`): of mixers, and of blocks that
    mix by themselves."""
    is_sparse = lambda x: DIVERGENCE in getattr(x, "value_names", ())
    mixers = {name for name, _, _ in list_modules(subject, is_sparse)}
    blocks = {name.rpartition(".")[0] for name in mixers}
    return tuple(f"{name}.{DIVERGENCE}" for name in sorted(mixers | blocks) if name)


def list_implementations(module: Any, given: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, Any, str]]:
    """Yield option, value, and reason not to compare it or "", for the implementations other than the module's own: the
    values given, and by default every name of an option's operation, or value of its `Literal`.

    Pallas kernels are compared by default only where they are compiled: in Pallas' interpreter on a CPU a check would
    take minutes.

    **Raises** `ValueError` for a name that is not an `implementation_option()` of the module.
    """
    options = {field.name: field for field in dataclasses.fields(module) if IMPLEMENTATION_OPTION in field.metadata}
    if unknown := given.keys() - options.keys():
        raise ValueError(
            f"implementations: {min(unknown)} is not an option of {type(module).__name__}, which has "
            f"{', '.join(options) or 'none'}"
        )
    operations = dict(find_operations(module))
    for name, field in options.items():
        is_literal = typing.get_origin(field.type) is typing.Literal
        if name in operations:
            values = operations[name].names
        elif is_literal:
            values = typing.get_args(field.type)
        else:
            values = ()
        for value in given.get(name, values):
            if value != getattr(module, name):
                is_slow = name not in given and value == "pallas" and current_platform() == "cpu"
                reason = f"{_IS_SLOW} {name}=[{value!r}]" if is_slow else ""
                yield name, value, reason


def set_implementation(subject: Subject, name: str, value: Any) -> Subject:
    """Return the subject with another value of one implementation option of its module."""
    return replace_option(subject, "module", replace_option(subject.module, name, value))
