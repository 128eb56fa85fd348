"""Abstract base classes of layers. A class is one of these, another abstract one, or final."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from zoo.parallel import Module, all_gather, num_shards, shard
from zoo.parallel.collectives import sharded_axes
from zoo.parallel.tokens import gather_tokens, match_tokens
from zoo.shapes import HiddenStates, ResidualStream

from .moe.routing import Routing
from .token_info import TokenInfo


class AbstractLinear(Module):
    """A linear map: a `Linear`, its quantized form, or one of these wrapped by an adapter.

    Sizes are per device inside `shard_map`.
    """

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        """Return W x + b."""

    @abc.abstractmethod
    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        """Return Wᵀ x."""

    @property
    @abc.abstractmethod
    def out_size(self) -> int:
        """Number of output features on this device."""

    @property
    def dense_weight(self) -> Float[Array, "out in"]:
        """Weight matrix W, dequantized to float32."""
        raise NotImplementedError(f"{type(self).__name__} has no matrix of its own")

    @property
    def dense_bias(self) -> Float[Array, "out"] | None:
        """Bias b, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no matrix of its own, and no bias of one")

    def with_weight(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None) -> "AbstractLinear":
        """Return a copy with this weight and bias, in the dtypes given."""
        raise NotImplementedError(f"{type(self).__name__} has no matrix of its own that could be exchanged")

    def with_dropout_keys(self, info: TokenInfo, site: int) -> "AbstractLinear":
        """Return a copy that holds the PRNG keys of its dropout; the layer itself where it has no dropout.

        `site` numbers the linear layers of a block, so that each draws another dropout mask.
        """
        return self

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        """Grouped matmul of stacked experts: W_e x + b_e for rows sorted by expert, `sizes[e]` rows of expert e.

        If the contracted dim is sharded, the result is a partial sum. The caller all-reduces it once, with `reduce`,
        after it has combined the experts.
        """
        raise NotImplementedError(f"{type(self).__name__} multiplies no groups of rows, as experts do")

    def per_head(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        """Block-diagonal matmul: W_h x_h + b_h for each head h, where `out` is a dim of heads."""
        raise NotImplementedError(f"{type(self).__name__} multiplies no head by itself, as latent attention does")

    def per_head_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        """Block-diagonal matmul with the transpose: W_hᵀ x_h for each head h."""
        raise NotImplementedError(f"{type(self).__name__} multiplies no head by itself, as latent attention does")


class AbstractNorm(Module):
    """Normalization over the last dim."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]: ...


class AbstractFeedForward(Module):
    """Position-wise feed-forward layer `x -> (y, routing)`: an MLP, or a mixture of experts."""

    @abc.abstractmethod
    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[Routing, ...]]:
        """Return the output, and the decisions of the router: `()` for a layer without one."""

    def grouped(self, x: Float[Array, "rows embed"], sizes: Int[Array, "experts"]) -> Float[Array, "rows embed"]:
        """Apply stacked experts to rows sorted by expert, `sizes[e]` rows of expert e.

        The result is a partial sum over "mlp", as in `AbstractLinear.grouped`.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no groups of rows, and so cannot be an expert")


class AbstractMixer(Module):
    """Sequence mixer `(x, info, state) -> (y, state)`: attention or a recurrence."""

    shards_sequence: ClassVar[bool] = False
    """True for a mixer that computes the same where `context` shards the sequence; a model with any other raises."""
    shards_state: ClassVar[bool] = False
    """True for a mixer that continues a state with a shard of the new tokens. `run_mixer` gives any other all of them,
    so that its state is replicated."""
    looks_ahead: ClassVar[bool] = False
    """True for a mixer that honors `TokenInfo.lookahead`; `run_mixer` raises for any other."""
    value_names: ClassVar[tuple[str, ...]] = ()
    """Names of values, besides inputs and results of modules, that `zoo.capture` reads."""
    per_head_linears: ClassVar[tuple[str, ...]] = ()
    """Fields of linear layers that it multiplies by `AbstractLinear.per_head` or its transpose."""

    @abc.abstractmethod
    def __call__(self, x: HiddenStates, info: TokenInfo, state: Any = None) -> tuple[ResidualStream, Any]:
        """Return the output, and the updated state: None if `state` is None, as in training."""

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """Return the empty KV cache or recurrent state for decoding up to `length` tokens."""

    @property
    def rope_switch_length(self) -> int | None:
        """Length beyond which RoPE has other frequencies for all tokens (LongRoPE), and cached keys are recomputed.
        None if there is no such length."""
        return None


def check_sequence_sharding(layers: PyTree, x: HiddenStates) -> None:
    """Check that all mixers of `layers` can compute a shard of the sequence, if `x` is one.

    **Raises** `NotImplementedError` that names the mixers that need the whole sequence.
    """
    if not (axes := sharded_axes(x, "seq")):
        return
    is_mixer = lambda module: isinstance(module, AbstractMixer)
    mixers = filter(is_mixer, jax.tree.leaves(layers, is_leaf=is_mixer))
    if names := sorted({type(mixer).__name__ for mixer in mixers if not mixer.shards_sequence}):
        sharding = f"{' x '.join(axes)}={num_shards(x, 'seq')}"
        raise NotImplementedError(
            f"{', '.join(names)} cannot mix a sequence that is sharded over {sharding}: leave context at 1, "
            "or use mixers whose `shards_sequence` is True"
        )


def run_mixer(
    mixer: AbstractMixer, x: ResidualStream, info: TokenInfo, state: Any = None
) -> tuple[ResidualStream, Any]:
    """Return `mixer(x, info, state)` for the tokens of the residual stream on this device: gather the tokens that
    sequence parallelism shards over `tensor`, mix them, and keep this device's tokens of the output.

    **Raises** `NotImplementedError` for tokens that look ahead, and a mixer that does not.
    """
    if info.lookahead is not None and not mixer.looks_ahead:
        raise NotImplementedError(f"tokens attend to later ones, and {type(mixer).__name__} does not look ahead")
    tokens = gather_tokens(x)
    if state is None:
        y, _ = mixer(tokens, info)
    else:
        y, state = mix_tokens(mixer, tokens, info, state)
    return match_tokens(checkpoint_name(y, "mixer_output"), x), state


def mix_tokens(mixer: AbstractMixer, x: HiddenStates, info: TokenInfo, state: Any = None) -> tuple[ResidualStream, Any]:
    """Return `mixer(x, info, state)`, where `x` may be a shard of the new tokens of a sequence.

    Caches are sharded with the sequence. A recurrent state is not, and has a size that does not grow with it: all new
    tokens are all-gathered, every device computes the recurrence, and each keeps the outputs of its own tokens. That
    repeats the mixer's work on the devices that share a prompt, and nothing while decoding, when they all have the one
    token. Training shares the work: it has no states.
    """
    if state is None or mixer.shards_state or not sharded_axes(x, "seq"):
        return mixer(x, info, state)
    if info.positions is None:
        positions = None
    else:
        positions = all_gather(info.positions, "seq", axis=1)
    if info.segment_ids is None:
        segment_ids = None
    else:
        segment_ids = all_gather(info.segment_ids, "seq", axis=1)
    info = dataclasses.replace(info, positions=positions, segment_ids=segment_ids)
    y, state = mixer(all_gather(x, "seq", axis=1), info, state)
    return shard(y, "seq", axis=1), state


def run_feed_forward(ffn: AbstractFeedForward, x: ResidualStream) -> tuple[ResidualStream, tuple[Routing, ...]]:
    """Return `ffn(x)` for the tokens of the residual stream on this device, gathered and kept as by `run_mixer`."""
    y, routing = ffn(gather_tokens(x))
    return match_tokens(y, x), routing
