"""From tokens to logits: hidden states, the pre-norm block, the loop over layers, the decoder and its unembedding.

`zoo.models.stack` is the same loop as a scan over repeating patterns, and `zoo.models.blocks` has the other residual
wirings. Nothing here imports either.
"""

import abc
import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from zoo._checks import check_not_donated, check_tokens, describe_argument
from zoo.layers import AbstractFeedForward, AbstractLinear, AbstractMixer, AbstractNorm, Dropout, TokenInfo
from zoo.layers.abstract import check_sequence_sharding, run_feed_forward, run_mixer
from zoo.layers.embedding import AbstractEmbedding, AbstractPositionEmbedding
from zoo.layers.encoders.patches import ImageEmbedding
from zoo.layers.moe.routing import Routing, RoutingSums, sum_routing
from zoo.layers.token_info import token_info, token_positions
from zoo.parallel import Module, buffer, gather, implementation_option, named_by_class, num_shards
from zoo.parallel.activation import Edit
from zoo.parallel.collectives import current_mesh
from zoo.parallel.fields import observed
from zoo.parallel.scope import has_value
from zoo.parallel.taps import in_layer
from zoo.parallel.tokens import merge_copies, replicate_tokens, shard_tokens
from zoo.parallel.trainable_copy import materialize
from zoo.shapes import PaddingMask, Positions, ResidualStream, SegmentIds, Tokens

from .hf.spec import Origin
from .torch_habits import explain_torch_habit, hash_for_jit

LayerStates = tuple[Any, ...]
"""KV caches and recurrent states, one per layer, of any shape."""
RoutingDetail = Literal["rows", "tokens"]
"""Routing decisions that a stack hands out: their sums over each row, or the decisions of every token, too."""

EMBEDDING_DROPOUT_SITE = 2**32 - 1
"""Dropout site of the embedding. Layers fold their number into the keys, and no layer's number is as large."""
_FIRST_LINEAR_SITE = 2**16
"""First dropout site of a block's linear layers. The sites below it are the block's own dropout."""


class Hidden(Module):
    """Hidden states between two layers, row first: the residual stream, and sums of the routers' decisions so far."""

    constant_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields of a subclass that layers read and do not change. A scan keeps them out of its carry, which
    rematerialization saves once per layer."""

    x: ResidualStream
    """Inside a stack, only this device's tokens if the layout shards them over `tensor` (`zoo.parallel.SEQUENCE`)."""
    routing: tuple[RoutingSums, ...] = ()
    """One per layer so far that has a router, in order."""
    decisions: tuple[Routing, ...] = ()
    """Decisions of the routers of this layer, per token. A stack sums them into `routing` where the layer has run."""

    def add_residual(self, residual: ResidualStream, decisions: tuple[Routing, ...] = ()) -> "Hidden":
        """Add the output of a sublayer to the residual stream, and append its routing decisions."""
        return dataclasses.replace(self, x=self.x + residual, decisions=self.decisions + decisions)

    def drop_routing(self) -> "Hidden":
        """Return the hidden states for the next layer, without the sums of routing decisions, which a stack
        collects."""
        return dataclasses.replace(self, routing=(), decisions=())

    def normalize(self, norm: AbstractNorm) -> "Hidden":
        """Normalize the residual stream."""
        return dataclasses.replace(self, x=norm(self.x))

    def sum_decisions(self, info: TokenInfo, detail: RoutingDetail) -> "Hidden":
        """Sum this layer's decisions into `routing`. No decision per token remains unless `detail` is "tokens"."""
        sums = tuple(sum_routing(decision, info.segment_ids) for decision in self.decisions)
        if detail == "tokens":
            pairs = zip(sums, self.decisions, strict=True)
            sums = tuple(dataclasses.replace(rows, per_token=decision) for rows, decision in pairs)
        return dataclasses.replace(self, routing=self.routing + sums, decisions=())


class AbstractLayerInputs(Module):
    """Inputs of layers besides the residual stream: `(tokens, embeddings) -> hidden states` of a subclass of `Hidden`,
    whose further fields go from layer to layer."""

    @abc.abstractmethod
    def __call__(self, tokens: Tokens, x: ResidualStream) -> Hidden:
        """Return the input of the first layer."""


class AbstractBlock(Module):
    """One layer: `(hidden, info, state) -> (hidden, state)`."""

    extends_hidden: ClassVar[bool] = False
    """True for a block that returns a subclass of `Hidden` of its own, with more than it was given."""

    @abc.abstractmethod
    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """Return the hidden states after this layer, and the updated state: None if `state` is None, as in training."""

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """Return the empty state of the layer for decoding up to `length` tokens."""


class AbstractMixerBlock(AbstractBlock):
    """One layer with a mixer and its norm: the state of the layer is the state of the mixer."""

    mixer_norm: eqx.AbstractVar[AbstractNorm]
    mixer: eqx.AbstractVar[AbstractMixer]

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)


class SharedModule(Module):
    """Stands in a block for module `number` of the modules that layers share, `Stack.shared`. The stack puts the module
    in its place where the block runs."""

    number: int = eqx.field(static=True)


class SharedBlock(SharedModule, AbstractBlock):
    """Stands in a stack for a whole layer: block `number` of `Stack.shared`, which several layers are. It has no
    parameters of its own."""

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        raise TypeError(_NOT_IN_STACK)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        raise TypeError(_NOT_IN_STACK)


_NOT_IN_STACK = "the block that this layer shares is in Stack.shared: run the layer in its stack"


def make_shared_block(number: int, key: Key[Array, ""]) -> SharedBlock:
    """Make the stand-in for block `number`. A factory, for `functools.partial`."""
    return SharedBlock(number)


def make_shared_module(number: int, key: Key[Array, ""]) -> SharedModule:
    """Make the stand-in for module `number`. A factory, for `functools.partial`."""
    return SharedModule(number)


def find_shared_modules(tree: Any) -> list[SharedModule]:
    """Return the shared modules that a block calls."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_shared) if _is_shared(x)]


def insert_shared(block: AbstractBlock, shared: tuple[Module, ...]) -> AbstractBlock:
    """Return the block with the modules that it shares with other layers in place of each `SharedModule`."""
    return jax.tree.map(lambda x: shared[x.number] if _is_shared(x) else x, block, is_leaf=_is_shared)


def _is_shared(x: Any) -> bool:
    return isinstance(x, SharedModule)


class Block(AbstractMixerBlock):
    """x + mixer(norm(x)), then x + ffn(norm(x)): the pre-norm layer (Xiong et al., arXiv:2002.04745, figure 1b).

    It takes any mixer `(x, info, state) -> (y, state)` and any feed-forward layer `x -> (y, routing)`. Both outputs are
    multiplied by `residual_multiplier`. Other residual wirings are other blocks.
    """

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    residual_multiplier: float = eqx.field(static=True, default=1.0)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        mixed, state = run_mixer(self.mixer, self.mixer_norm(hidden.x), info, state)
        hidden = hidden.add_residual(self._scale_residual(self.dropout(mixed, info, site=0)))
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(hidden.x))
        fed = checkpoint_name(fed, "ffn_output")
        return hidden.add_residual(self._scale_residual(self.dropout(fed, info, site=1)), routing), state

    def _scale_residual(self, x: ResidualStream) -> ResidualStream:
        if self.residual_multiplier == 1:
            return x
        return self.residual_multiplier * x


class AbstractStack(Module):
    """All layers of a model: `(hidden, info, states) -> (hidden, states)`.

    A model holds one stack and calls it once, so that a schedule (a scan, a pipeline) can replace it.
    """

    holds_layers: ClassVar[bool] = True
    hides_value: ClassVar[bool] = True  # its input and its result are the values of the first and the last layer

    @abc.abstractmethod
    def __call__(
        self, hidden: Hidden, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        """Return the hidden states after all layers, and the updated states: None if `states` is None."""

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LayerStates:
        """Return empty states for up to `length` tokens, one per layer."""


class UnrolledStack(AbstractStack):
    """The plain loop over layers, for decoding: a token writes one row of each KV cache, in place if states are
    donated. A scan would copy weights and states at every step.

    The parameters of a block are all-gathered just before it runs.
    """

    blocks: tuple[AbstractBlock, ...]
    shared: tuple[Module, ...] = ()
    """Modules that several layers call."""

    routing: RoutingDetail = implementation_option(default="rows")

    def iter_blocks(self) -> Iterator[AbstractBlock]:
        """Yield the block of each layer, with the modules that it shares."""
        return (insert_shared(block, self.shared) for block in self.blocks)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> LayerStates:
        # Of gathered parameters: a state has all of embed (token shift), which parameters shard at rest (ZeRO-3).
        return tuple(gather(block).init_state(batch, length, dtype) for block in self.iter_blocks())

    def __call__(
        self, hidden: Hidden, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        new_states = []
        for number, block in enumerate(self.iter_blocks()):
            layer_info = info.fold_keys(number)
            state = None if states is None else states[number]
            with in_layer(number, self._find_layers):
                hidden, state = run_block(gather(block), hidden, layer_info, state, self.routing)
            new_states.append(state)
        if states is None:
            return hidden, None
        return hidden, tuple(new_states)

    def _find_layers(self, name: str) -> list[int]:
        return [number for number, block in enumerate(self.iter_blocks()) if has_value(block, name)]


def run_block(
    block: AbstractBlock, hidden: Hidden, info: TokenInfo, state: Any, routing: RoutingDetail
) -> tuple[Hidden, Any]:
    """Run a gathered block with the PRNG keys of its layer, and sum its routing decisions.

    **Raises** `TypeError` for a block that returns other hidden states than it was given, and does not say so.
    """
    output, state = set_dropout_keys(block, info)(hidden, info, state)
    if type(output) is not type(hidden) and not block.extends_hidden:
        raise TypeError(
            f"{type(block).__name__} was given {type(hidden).__name__} and returns {type(output).__name__}: "
            "change fields with dataclasses.replace, or set extends_hidden = True if the block adds some"
        )
    return output.sum_decisions(info, routing), state


def set_dropout_keys(block: AbstractBlock, info: TokenInfo) -> AbstractBlock:
    """Give this layer's PRNG keys to every linear that applies dropout. Only adapters do."""
    if info.keys is None:
        return block
    sites = itertools.count(_FIRST_LINEAR_SITE)

    def set_keys(node: Any) -> Any:
        if isinstance(node, AbstractLinear):
            return node.with_dropout_keys(info, next(sites))
        return node

    return jax.tree.map(set_keys, block, is_leaf=lambda node: isinstance(node, AbstractLinear))


class Decoder(Module):
    """A causal language model: logits = head(norm(stack(embedding(tokens)))).

    Without a head, the embedding is tied: logits = W_embedding norm(...). A `position_embedding` is added to the token
    embedding, and `embedding_norm` normalizes the sum.

    The batch is explicit: `model(tokens)` takes "batch seq" and returns "batch seq vocab".
    """

    embedding: AbstractEmbedding
    stack: AbstractStack
    norm: AbstractNorm
    head: AbstractLinear | None
    dropout: Dropout
    embedding_projection: AbstractLinear | None = None
    """From the features of the embedding to the features of the residual stream, where these differ."""
    position_embedding: AbstractPositionEmbedding | None = None
    embedding_norm: AbstractNorm | None = None
    layer_inputs: AbstractLayerInputs | None = None
    """Inputs of layers besides the embedding, if they have any (`zoo.models.layer_inputs`)."""
    logit_maximum: Float[Array, "1"] | None = observed(default=None)
    """The largest logit, in a model that is observed (`zoo.models.observe`)."""
    predictors: tuple[Any, ...] = ()
    """Modules that predict further tokens from the hidden states (`zoo.models.predictors`)."""
    edits: tuple[Edit, ...] = buffer(default=())
    """Edits of values of the forward pass (`zoo.patch`)."""

    logits_multiplier: float = eqx.field(static=True, default=1.0)
    soft_cap: float | None = eqx.field(static=True, default=None)
    """Logit soft-capping: c tanh(logits / c), after `logits_multiplier`."""
    hidden_states_skip_embedding: bool = implementation_option(default=False)
    """If True, `hidden_states` are the outputs of the layers and then the last one normalized, as in transformers for
    Mamba and RWKV. If False, they begin with the embedding."""
    origin: Origin | None = implementation_option(default=None)
    """The checkpoint that the model was loaded from, which `zoo.save` needs."""

    if not TYPE_CHECKING:  # for a type checker every name would be an attribute
        __getattr__ = explain_torch_habit

    def __hash__(self) -> int:
        return hash_for_jit(self)

    def __call__(
        self,
        tokens: Tokens,
        *,
        mask: PaddingMask | None = None,
        segment_ids: SegmentIds | None = None,
        positions: Positions | None = None,
        key: Key[Array, ""] | Key[Array, "batch"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Return the next-token logits at every position.

        - `mask`: padding mask, True or 1 for real tokens. Padding is left or right; its logits are meaningless.
        - `segment_ids`: packed sequences, each document of a row with an id of its own, and 0 for padding. Tokens
          attend only within their segment, and positions restart in each unless given.
        - `positions`: position of each token in its document; negative for padding.
        - `key`: PRNG key for dropout, one or one per row. No dropout without it.

        All of them are arrays of NumPy or JAX, of any integer dtype.

        **Raises** `ValueError` for tokens that are not "batch seq" and arrays of other shapes, for a `mask` together
        with `segment_ids` or `positions`, and for more tokens than there are learned positions; `TypeError` for arrays
        of other dtypes. Where values can be read, `ValueError` also for an id outside the vocabulary, which inside
        programs gives NaN, for padding between real tokens, and for a segment id that comes again after another.
        """
        check_tokens(tokens, find_checkable_vocab(self))
        info = token_info(tokens, mask=mask, segment_ids=segment_ids, positions=positions, key=key)
        hidden, _ = self.hidden(tokens, info)
        return self.logits(hidden.x)

    def hidden(
        self, tokens: Tokens, info: TokenInfo, states: LayerStates | None = None
    ) -> tuple[Hidden, LayerStates | None]:
        """Return the hidden states after the final norm, and the updated states: None if `states` is None.

        With `states`, tokens continue those before: `info` has their positions, -1 for padding to the left of a row's
        tokens, as `zoo.models.count_positions` counts them.

        **Raises** `ValueError` with states for segment ids, and for a mixer that needs positions without them;
        `NotImplementedError` where the sequence is sharded, for a mixer that needs all of it.
        """
        if states is None:
            info = info.mask_padding()
        hidden = self.embed(tokens, info)
        if states is None:
            check_sequence_sharding(self.stack, hidden.x)
        hidden, states = self.stack(hidden, info, states)
        x = replicate_tokens(gather(self.norm)(hidden.x))
        return Hidden(x, merge_copies(hidden.routing)), states

    def embed(self, tokens: Tokens, info: TokenInfo) -> Hidden:
        """Return the input of the first layer: token embeddings, plus positions if they are embedded."""
        x = gather(self.embedding)(tokens)
        if self.embedding_projection is not None:
            x = gather(self.embedding_projection)(x)
        if self.position_embedding is not None:
            if info.positions is None:
                check_length(self, tokens.shape[1] * num_shards(x, "seq"))
            positions = shard_tokens(token_positions(tokens, info), axis=-1)
            x = x + gather(self.position_embedding)(positions).astype(x.dtype)
        if self.embedding_norm is not None:
            x = gather(self.embedding_norm)(x)
        x = self.dropout(x, info, site=EMBEDDING_DROPOUT_SITE)
        if self.layer_inputs is None:
            return Hidden(x)
        return gather(self.layer_inputs)(tokens, x)

    def logits(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """Return the logits of normalized hidden states: this device's shard of them if the vocabulary is sharded."""
        return self.gather_unembedding()(x)

    def gather_unembedding(self) -> "_Unembedding":
        """All-gather the parameters of the head, or of the tied embedding."""
        table = self.embedding if self.head is None else self.head
        return _Unembedding(gather(table), self.soft_cap, self.logits_multiplier)

    def init_state(self, batch: int, length: int) -> LayerStates:
        """Return empty states, one per layer, for `batch` rows of up to `length` tokens, in the dtype of activations.

        **Raises** `ValueError` for more tokens than there are learned positions.
        """
        check_length(self, length)
        dtype = jax.eval_shape(materialize(self.embedding), jnp.zeros((1, 1), int)).dtype
        return self.stack.init_state(batch, length, dtype)


def check_length(model: Any, length: int) -> None:
    """**Raises** `ValueError` for more tokens than there are learned positions."""
    if model.position_embedding is not None and length > model.position_embedding.length:
        raise ValueError(f"{length} tokens are too many: the model learned {model.position_embedding.length} positions")


def find_checkable_vocab(model: Any) -> int | None:
    """Return the size of the vocabulary, to check ids; None inside `zoo.spmd`, where a device may hold a shard.

    **Raises** `TypeError` for a model of images, and for what is not a model, such as logits.
    """
    if not isinstance(model, Module):
        advice = ""
        if hasattr(model, "shape"):
            advice = (
                ". Pass the model itself, as in zoo.cross_entropy(model, batch), which computes the logits; of logits, "
                "zoo.models.token_losses(logits, targets) returns the losses"
            )
        raise TypeError(f"expected a Decoder or Encoder of tokens, got {describe_argument(model)}{advice}")
    embedding: Any = getattr(model, "embedding")  # noqa: B009, a model of scores explains that it has none
    check_not_donated(embedding)
    if isinstance(embedding, ImageEmbedding):
        raise TypeError(
            f"expected a model of tokens, and {type(model).__name__} reads images: model(images), or "
            "model.hidden(images, model.token_info(images)).x for the hidden states after the final norm"
        )
    if current_mesh() is not None:
        return None
    return embedding.table_shape[0]


class _Unembedding(Module):
    """Hidden states to logits: a head, or the transpose of an embedding."""

    table: AbstractLinear | AbstractEmbedding

    soft_cap: float | None = eqx.field(static=True)
    multiplier: float = eqx.field(static=True, default=1.0)

    def __call__(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        if isinstance(self.table, AbstractEmbedding):
            logits = self.table.transposed(x)
        else:
            logits = self.table(x)
        if self.multiplier != 1:
            logits = self.multiplier * logits
        if self.soft_cap is None:
            return logits
        return self.soft_cap * jnp.tanh(logits / self.soft_cap)
