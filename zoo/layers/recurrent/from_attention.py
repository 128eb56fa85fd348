"""Recurrent mixers that begin with the projections of trained attention, to be trained in its place.

    mixer = copy_to_gated_delta_net(block.mixer, key=key)
    model = zoo.models.replace_mixers(model, {1: mixer})

A linear recurrence reads its state with queries, and writes it with keys and values, as attention does without the
softmax: trained projections are a start (Bick et al., arXiv:2408.10189; Wang et al., arXiv:2408.15237).
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..abstract import AbstractLinear, AbstractNorm
from ..attention.attention import Attention
from ..convolution import ShortConvolution
from ..norm import RMSNorm
from .delta_net import GatedDeltaNet
from .mamba2 import Mamba2


def copy_to_gated_delta_net(attention: Attention, *, key: Key[Array, ""]) -> GatedDeltaNet:
    """Make a `GatedDeltaNet` with the queries, keys, values and output projection of trained attention.

    - With fewer `kv_heads` than `heads`, each head has its own copy of the keys and values of its group.
      `GroupedGatedDeltaNet` has no place for them: its groups share queries too.
    - The weights of a QK norm are multiplied into the projections. The delta rule normalizes queries and keys itself.
    - Short convolutions begin as the identity. Decays, betas and the output gate are initialized with `key`.
    - RoPE is dropped, and so is what belongs to the softmax: scale, window, soft cap, sinks, clip.

    Parameters are float32. **Raises** `TypeError` for another class than `Attention`, and `NotImplementedError` for a
    QK norm that is not an `RMSNorm`.
    """
    embed, heads = _find_sizes(attention)
    mixer = GatedDeltaNet(embed, heads, key_dim=attention.head_dim, value_dim=attention.head_dim, key=key)

    def find_copied(mixer: GatedDeltaNet) -> list[Any]:
        inputs = mixer.projections
        return [inputs.query, inputs.key, inputs.value, mixer.readout.out, *inputs.convolutions]

    query, key_, value, out, *convolutions = find_copied(mixer)
    linears = _copy_projections(attention, query, key_, value, out)
    return eqx.tree_at(find_copied, mixer, [*linears, *map(_make_identity, convolutions)])


def copy_to_mamba2(attention: Attention, *, key: Key[Array, ""]) -> Mamba2:
    """Make a `Mamba2` with the projections of trained attention: C of its queries, B of its keys, x of its values, and
    its output projection (arXiv:2408.10189).

    Each head is a group, whose B and C have `head_dim` features. dt, A, D and the gate are initialized with `key`. Of a
    QK norm only the weights remain, since Mamba-2 does not normalize B and C. Everything else, also what is **raised**,
    is as in `copy_to_gated_delta_net`.
    """
    embed, heads = _find_sizes(attention)
    mixer = Mamba2(embed, heads, head_dim=attention.head_dim, groups=heads, state_dim=attention.head_dim, key=key)

    def find_copied(mixer: Mamba2) -> list[Any]:
        convolutions = [mixer.C_convolution, mixer.B_convolution, mixer.x_convolution]
        return [mixer.C, mixer.B, mixer.x, mixer.out, *convolutions]

    C, B, x, out, *convolutions = find_copied(mixer)
    linears = _copy_projections(attention, C, B, x, out)
    return eqx.tree_at(find_copied, mixer, [*linears, *map(_make_identity, convolutions)])


def _find_sizes(attention: Attention) -> tuple[int, int]:
    """Return the features of the input, and the number of heads."""
    if type(attention) is not Attention:
        raise TypeError(f"the projections of an Attention can be copied, not those of {type(attention).__name__}")
    return attention.query.dense_weight.shape[1], attention.query.out_size // attention.head_dim


def _copy_projections(
    attention: Attention, query: AbstractLinear, key: AbstractLinear, value: AbstractLinear, out: AbstractLinear
) -> list[AbstractLinear]:
    """Return these linear layers of a recurrence with the weights and biases of attention."""
    head_dim = attention.head_dim
    return [
        _copy_heads(attention.query, query, attention.query_norm, head_dim),
        _copy_heads(attention.key, key, attention.key_norm, head_dim, repeats=attention.group),
        _copy_heads(attention.value, value, None, head_dim, repeats=attention.group),
        out.with_weight(attention.out.dense_weight, attention.out.dense_bias),
    ]


def _copy_heads(
    trained: AbstractLinear, linear: AbstractLinear, norm: AbstractNorm | None, head_dim: int, *, repeats: int = 1
) -> AbstractLinear:
    """Return `linear` with the trained projection to heads, times the weights of its norm, each head `repeats` times.

    RMSNorm(W x + b) with weights w is diag(w) (W x + b) up to its length.
    """
    scale = jnp.ones((1, head_dim))
    if norm is not None:
        if not isinstance(norm, RMSNorm):
            raise NotImplementedError(
                f"the QK norm is a {type(norm).__name__}: only the weights of an RMSNorm can be multiplied into the "
                "projections"
            )
        if norm.weight is not None:
            scale = (norm.offset + norm.weight).reshape(-1, head_dim)  # of all heads, or of each

    def copy(rows: Float[Array, "out *in"]) -> Float[Array, "_ *in"]:
        heads = rows.astype(jnp.float32).reshape(-1, head_dim, *rows.shape[1:])
        heads = heads * scale.reshape(*scale.shape, *[1] * (rows.ndim - 1))
        return jnp.repeat(heads, repeats, axis=0).reshape(-1, *rows.shape[1:])

    bias = None if trained.dense_bias is None else copy(trained.dense_bias)
    return linear.with_weight(copy(trained.dense_weight), bias)


def _make_identity(convolution: ShortConvolution) -> ShortConvolution:
    """Return a convolution that reads the present token only."""
    weight = jnp.zeros_like(convolution.weight).at[:, -1].set(1)
    return eqx.tree_at(lambda x: x.weight, convolution, weight)
