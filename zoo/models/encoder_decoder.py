"""From a source and the beginning of a target to logits: an encoder, and a decoder that attends to what it returns."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key

from zoo._checks import check_ids, check_mask, check_tokens, is_host_readable
from zoo.layers import TokenInfo
from zoo.layers.attention.cross import EncodedSource, SourceKeys
from zoo.layers.embedding import SharedEmbedding
from zoo.layers.token_info import count_positions
from zoo.parallel import Module, all_gather, gather, implementation_option, num_shards, shard
from zoo.shapes import Tokens

from .cross_blocks import AbstractCrossBlock, SourceInputs
from .decoder import AbstractBlock, Decoder, LayerStates, find_checkable_vocab
from .encoders.text import Encoder
from .hf.spec import Origin
from .torch_habits import explain_torch_habit, hash_for_jit

_ENCODER = 2**20
"""Number that is folded into the PRNG keys of the encoder, so that its layers draw other dropout masks."""


class EncoderDecoder(Module):
    """A model of targets given sources: p(target | source), by a decoder whose layers attend to the encoder's output
    (Vaswani et al., arXiv:1706.03762).

        logits = model(source, tokens)             # of the next token of the target
        decoder = model.read(source)               # a Decoder of targets of this source, for zoo.capture and others
        zoo.generate(model, source, max_new_tokens=32)

    A target begins with the tokens of `start`: `tokens` are these, and then the target without its last token.
    """

    encoder: Any
    """An `Encoder`, or another model with its methods `token_info` and `hidden`."""
    decoder: Decoder
    """A decoder whose blocks are `AbstractCrossBlock`s."""

    start: tuple[int, ...] = implementation_option(default=(0,))
    """Token ids that every target begins with: the start token, then any that are forced, such as a language. For
    another language: `dataclasses.replace(model, start=(2, language))`."""
    origin: Origin | None = implementation_option(default=None)
    """The checkpoint that the model was loaded from, which `zoo.save` needs."""

    if not TYPE_CHECKING:  # for a type checker every name would be an attribute
        __getattr__ = explain_torch_habit

    def __hash__(self) -> int:
        return hash_for_jit(self)

    @property
    def whole_encoder(self) -> Any:
        """The encoder with the embedding that it may share with the decoder."""
        if isinstance(getattr(self.encoder, "embedding", None), SharedEmbedding):
            return dataclasses.replace(self.encoder, embedding=self.decoder.embedding)
        return self.encoder

    @property
    def embedding(self) -> NoReturn:
        """**Raises** `TypeError`: an encoder-decoder is not a model of one text."""
        raise TypeError(
            "an EncoderDecoder reads a source besides the tokens of a target: model(source, tokens), or "
            "decoder = model.read(source), a Decoder of targets of this source"
        )

    def __call__(
        self,
        source: Array,
        tokens: Tokens,
        *,
        mask: Bool[Array, "batch _"] | None = None,
        key: Key[Array, ""] | Key[Array, "batch"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Return the logits of the next token at every position of a target.

        - `source`: token ids "batch seq", or what else the encoder reads.
        - `tokens`: the target, beginning with `start`. Padding is on the right; its logits are meaningless.
        - `mask`: padding mask of the source, True or 1 for real tokens. Padding is left or right.
        - `key`: PRNG key for dropout, one or one per row. No dropout without it.

        **Raises** `ValueError` and `TypeError` as `zoo.models.Decoder` does for tokens, of source and target; for other
        numbers of rows; `NotImplementedError` on a mesh with `pipe`.
        """
        check_tokens(tokens, find_checkable_vocab(self.decoder))
        _check_source_rows(source, tokens)
        return self.read(source, mask=mask, key=key)(tokens, key=key)

    def read(
        self,
        source: Array,
        *,
        mask: Bool[Array, "batch _"] | None = None,
        key: Key[Array, ""] | Key[Array, "batch"] | None = None,
    ) -> Decoder:
        """Encode a source; return the decoder of its targets. Arguments are as for the model."""
        return dataclasses.replace(self.decoder, layer_inputs=SourceInputs(self.encode(source, mask=mask, key=key)))

    def encode(
        self,
        source: Array,
        *,
        mask: Bool[Array, "batch _"] | None = None,
        key: Key[Array, ""] | Key[Array, "batch"] | None = None,
    ) -> EncodedSource:
        """Return the encoder's hidden states after its final norm. Arguments are as for the model."""
        self.check_source(source, mask)
        encoder = self.whole_encoder
        padding: dict[str, Any] = {} if mask is None else {"mask": mask}
        if mask is not None and num_shards(mask, "seq") > 1:
            positions = shard(count_positions(all_gather(mask, "seq", axis=1)), "seq", axis=1)
            padding = {"segment_ids": mask.astype(jnp.int32), "positions": positions}
        info: TokenInfo = encoder.token_info(source, key=key, **padding).fold_keys(_ENCODER)
        hidden, _ = encoder.hidden(source, info)
        return EncodedSource(hidden.x, None if mask is None else jnp.asarray(mask, bool))

    @property
    def reads_tokens(self) -> bool:
        """True if sources are texts."""
        return isinstance(self.encoder, Encoder)

    @property
    def source_key(self) -> str:
        """Name of the sources in a batch: `source`, "batch seq", or `features`."""
        return "source" if self.reads_tokens else "features"

    def check_source(self, source: Any, mask: Any = None) -> None:
        """**Raises** `ValueError` and `TypeError` for a source that the encoder does not read, and, where values can be
        read, for a row without a real token, or with more than there are learned positions."""
        if not self.reads_tokens:
            self.encoder.check_inputs(source, mask)
            return
        check_tokens(source, name="source")
        is_real = np.ones(source.shape, bool)
        if mask is not None:
            check_mask(mask, source)
            if not is_host_readable(mask):
                return
            is_real = np.asarray(jax.device_get(mask)).astype(bool)
        counts = is_real.sum(1)
        if 0 in counts:
            raise ValueError(f"source: row {int(np.argmin(counts))} has no real token")
        learned = self.encoder.position_embedding
        if learned is not None and counts.max(initial=0) > learned.length:
            raise ValueError(
                f"source: {counts.max()} tokens are too many: the encoder learned {learned.length} positions"
            )
        vocab = find_checkable_vocab(self.whole_encoder)
        if is_host_readable(source) and vocab is not None:
            check_ids(np.asarray(jax.device_get(source))[is_real], vocab, name="source")

    def init_state(self, source: EncodedSource, length: int) -> LayerStates:
        """Return the states of the decoder's layers before the first token of targets of up to `length` tokens: empty
        ones, and the keys and values of the source.

        **Raises** `ValueError` for more tokens than there are learned positions.
        """
        states = self.decoder.init_state(len(source.x), length)
        stack: Any = self.decoder.stack
        return tuple((own, _read_source(block, source)) for own, block in zip(states, stack.iter_blocks(), strict=True))

    def bind(
        self, batch: Mapping[str, Array], key: Key[Array, "batch"] | None = None
    ) -> tuple[Decoder, dict[str, Array]]:
        """Return the decoder of the targets of a batch, and the batch without its sources: what
        `zoo.cross_entropy` calls.

        - `batch`: `source`, "batch seq", and optionally its padding mask, `source_mask`, besides the keys of a decoder.

        **Raises** `ValueError` for a batch without a source, with another number of them than of targets, or with
        packed rows, whose targets would all attend to the one source of the row.
        """
        name = self.source_key
        if name not in batch:
            raise ValueError(f"the batch has no {name}, only {', '.join(map(str, batch)) or 'nothing'}")
        if "segment_ids" in batch:
            raise ValueError(
                "segment_ids: a row of an EncoderDecoder has one source, and so one target: do not pack it"
            )
        if "tokens" in batch:
            _check_source_rows(batch[name], batch["tokens"])
        decoder = self.read(batch[name], mask=batch.get("source_mask"), key=key)
        return decoder, {key: x for key, x in batch.items() if key not in (name, "source_mask")}


def _read_source(block: AbstractBlock, source: EncodedSource) -> SourceKeys:
    """Return the keys and values of a source in a layer. **Raises** `TypeError` for a layer without cross-attention."""
    if not isinstance(block, AbstractCrossBlock):
        raise TypeError(
            f"a decoder of targets attends to their source in each layer, and {type(block).__name__} does not"
        )
    return gather(block.cross).read(source)


def _check_source_rows(source: Any, tokens: Any) -> None:
    """**Raises** `ValueError` unless there is a source for each target."""
    if len(source) != len(tokens):
        raise ValueError(f"source: expected a row for each of {len(tokens)} targets, got {len(source)}")
