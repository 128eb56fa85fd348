"""Compressed keys of blocks of tokens, the indexer that selects among them, and RoPE on the last features of heads."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from zoo.ops.attention.compress import compress_blocks
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.parallel import Dim, Module, full_precision, no_weight_decay
from zoo.shapes import HiddenStates

from ..abstract import AbstractLinear, AbstractNorm
from ..heads import split_heads
from ..linear import Linear
from ..norm import RMSNorm
from .key_blocks import check_sizes
from .sparse_latent import Angles, score_all_heads

TokenFeatures = Float[Array, "batch seq _"]
TokensOfBlocks = Float[Array, "batch blocks size _"]
KeysOfBlocks = Float[Array, "batch blocks _"]


class TokenCompressor(Module):
    """One key for each block of `block` tokens (DeepSeek-V4, 2026, section 2.3):

        norm(sum_j w_j W_value x_j),    w = softmax_j(W_gate x_j + places_j)

    over the tokens j of the block, for each feature by itself. With `overlap`, W_value and W_gate have two rows for
    each feature: the first for the block after the token's own, and the second for its own, so that a key is made of
    the tokens of two blocks. See `zoo.ops.attention.compress`.
    """

    value: AbstractLinear
    gate: AbstractLinear
    places: Float[Array, "chunk features"] = no_weight_decay(full_precision=True)
    norm: AbstractNorm

    block: int = eqx.field(static=True)
    """Tokens of a block."""
    overlap: bool = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        head_dim: int,
        block: int,
        *,
        overlap: bool = False,
        epsilon: float = 1e-6,
        key: Key[Array, ""],
    ):
        """- `epsilon`: of the norm. **Raises** `ValueError` for a block below 1."""
        check_sizes(block=block)
        value_key, gate_key = jax.random.split(key)
        size = head_dim * (1 + overlap)
        features = Dim("features")
        self.value = Linear(embed, size, in_=Dim("embed"), out=features, key=value_key)
        self.gate = Linear(embed, size, in_=Dim("embed"), out=features, key=gate_key)
        self.places = jnp.zeros((block, size), jnp.float32)
        self.norm = RMSNorm(head_dim, features=Dim("head_dim"), epsilon=epsilon)
        self.block = block
        self.overlap = overlap

    @property
    def token_size(self) -> int:
        """Numbers of a token that its blocks are made of."""
        return self.value.out_size + self.gate.out_size

    def project(self, x: HiddenStates) -> TokenFeatures:
        """Return the values and gates of each token, as cached."""
        return jnp.concatenate([self.value(x), self.gate(x)], axis=-1)

    def compress(self, tokens: TokensOfBlocks, follows: Bool[Array, "batch blocks"]) -> KeysOfBlocks:
        """Return the key of each block, of the projections of its tokens. `follows` is True where the block before is
        the one before it in the array."""
        values, gates = jnp.split(tokens, 2, axis=-1)
        return self.norm(compress_blocks(values, gates, self.places, follows if self.overlap else None))


class BlockIndexer(Module):
    """Lightning indexer of compressed keys (DeepSeek-V4, 2026, section 2.3.1): a query t selects the `top` blocks s
    with the highest

        I(t, s) = sum over heads h of w_h(t) relu(q_h(t) . k(s)) (head_dim heads) ** -0.5

        q_h = rotate(W_query_up,h c),    k = rotate(compressor(x)),    w = W_weights x

    of those that it may attend to; c is the latent of queries, and RoPE turns the last features of a head. A selection
    has no gradient, and so neither have the parameters here: they are trained by `zoo.models.indexer_loss`. Scores are
    as in `zoo.layers.LightningIndexer`.
    """

    query_up: AbstractLinear
    head_weights: AbstractLinear = full_precision()
    compressor: TokenCompressor

    head_dim: int = eqx.field(static=True)
    top: int = eqx.field(static=True)
    """Blocks that a query attends to at most."""

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        query_latent: int,
        head_dim: int,
        block: int,
        top: int,
        overlap: bool = True,
        epsilon: float = 1e-6,
        key: Key[Array, ""],
    ):
        """- `query_latent`: size of the latent of queries.
        - `block`, `overlap`: of the compressor, as in the layer.

        **Raises** `ValueError` for a size below 1.
        """
        check_sizes(heads=heads, head_dim=head_dim, top=top)
        query_key, weight_key, compressor_key = jax.random.split(key, 3)
        per_head = Dim("heads", head_dim)
        self.query_up = Linear(query_latent, heads * head_dim, in_=Dim("latent"), out=per_head, key=query_key)
        self.head_weights = Linear(embed, heads, in_=Dim("embed"), out=Dim("heads"), key=weight_key)
        self.compressor = TokenCompressor(embed, head_dim, block, overlap=overlap, epsilon=epsilon, key=compressor_key)
        self.head_dim = head_dim
        self.top = top

    def score(
        self, x: HiddenStates, latent: Float[Array, "batch seq _"], keys: KeysOfBlocks, rotary: Rotary, cos_sin: Angles
    ) -> Float[Array, "batch seq blocks"]:
        """Return the scores I of queries and blocks, from the latents of the queries."""
        query = rotate_last(split_heads(self.query_up(latent), self.head_dim), rotary, cos_sin)
        return score_all_heads(query, keys, self.head_weights(x.astype(jnp.float32)))


def rotate_last(
    x: Float[Array, "batch seq heads _"], rotary: Rotary, cos_sin: Angles
) -> Float[Array, "batch seq heads _"]:
    """Turn the last `rotary.dim` features of each head."""
    rest, turned = jnp.split(x, [x.shape[-1] - rotary.dim], axis=-1)
    return jnp.concatenate([rest, apply_rotary(turned, *cos_sin, interleaved=rotary.interleaved)], axis=-1)
