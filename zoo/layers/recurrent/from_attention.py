"""Recurrent mixers that begin with the projections of trained attention, to be trained in its place.

    mixer = copy_to_gated_delta_net(block.mixer, key=key)
    model = zoo.models.replace_mixers(model, {1: mixer})

A linear recurrence reads its state with queries, and writes it with keys and values, as attention does without the
softmax: trained projections are a start (Bick et al., arXiv:2408.10189, section 4; Wang et al., arXiv:2408.15237,
section 2.2).
"""

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

    def find_copied(mixer: GatedDeltaNet) -> list[eqx.Module]:
        inputs = mixer.projections
        return [inputs.query, inputs.key, inputs.value, mixer.readout.out, *inputs.convolutions]

    query, key_, value, out, *convolutions = find_copied(mixer)
    linears = _copy_projections(attention, query, key_, value, out)
    return eqx.tree_at(find_copied, mixer, [*linears, *map(_make_identity, convolutions)])


def copy_to_mamba2(attention: Attention, *, key: Key[Array, ""]) -> Mamba2:
    """Make a `Mamba2` with the projections of trained attention: C of its queries, B of its keys, x of its values, and
    its output projection (arXiv:2408.10189, section 4).

    Each head is a group, whose B and C have `head_dim` features. dt, A, D and the gate are initialized with `key`. Of a
    QK norm only the weights remain, since Mamba-2 does not normalize B and C. Everything else, also what is **raised**,
    is as in `copy_to_gated_delta_net`.
    """
    embed, heads = _find_sizes(attention)
    mixer = Mamba2(
        embed, heads, head_dim=attention.head_dim, groups=heads, state_dim=attention.head_dim, key=key
    )

    def find_copied(mixer: Mamba2) -> list[eqx.Module]:
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
    """Return these linear layers of a recurrence with the weights and biases of attention, a row of keys and values
    for each head."""
    copied = []
    norms = {"query": attention.query_norm, "key": attention.key_norm, "value": None}
    for (name, norm), linear in zip(norms.items(), (query, key, value), strict=True):
        trained = getattr(attention, name)
        repeats = 1 if name == "query" else attention.group
        weight = _copy_rows(trained.dense_weight, norm, attention.head_dim, repeats)
        bias = None
        if trained.dense_bias is not None:
            bias = _copy_rows(trained.dense_bias[:, None], norm, attention.head_dim, repeats)[:, 0]
        copied.append(linear.with_weight(weight, bias))
    bias = attention.out.dense_bias
    bias = None if bias is None else bias.astype(jnp.float32)
    return [*copied, out.with_weight(attention.out.dense_weight, bias)]


def _copy_rows(
    weight: Float[Array, "out in"], norm: AbstractNorm | None, head_dim: int, repeats: int
) -> Float[Array, "_ in"]:
    """Multiply the rows of a weight by the weights of a QK norm, and repeat the rows of each head."""
    heads = weight.astype(jnp.float32).reshape(-1, head_dim, weight.shape[1])
    if norm is not None:
        if not isinstance(norm, RMSNorm):
            raise NotImplementedError(
                f"the QK norm is a {type(norm).__name__}: only the weights of an RMSNorm can be multiplied into queries "
                "and keys"
            )
        if norm.weight is not None:  # over the features of one head, or of all
            heads = heads * (norm.offset + norm.weight).reshape(-1, head_dim, 1)
    return jnp.repeat(heads, repeats, axis=0).reshape(-1, weight.shape[1])


def _make_identity(convolution: ShortConvolution) -> ShortConvolution:
    """Return a convolution that reads the present token only."""
    weight = jnp.zeros_like(convolution.weight).at[:, -1].set(1)
    return eqx.tree_at(lambda x: x.weight, convolution, weight)
