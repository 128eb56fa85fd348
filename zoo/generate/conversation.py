"""A text that goes on: its next tokens are read behind those that the caches and recurrent states hold."""

from collections.abc import Generator, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from zoo._checks import wrap_key
from zoo._keywords import check_keywords
from zoo.models import Decoder, ImageText
from zoo.models.image_text import check_texts, reads_prefix
from zoo.parallel import Mesh
from zoo.parallel.spmd import run_jitted

from . import request
from .buckets import choose_cache_length, choose_rows, pad_prompt
from .decode import DecodeState, begin, decode_until, read_on, unstack_layers
from .image_prompt import read_images
from .prefill import drop_sequence_parallelism, find_rope_switches, on_mesh, pad_after
from .request import DecodeOptions, Sampling, SamplingOptions


class Conversation:
    """Generates one text in turns, and reads each token once.

        conversation = Conversation(model, stop_tokens=[2])
        for token in conversation.stream(tokens, max_new_tokens=100):
            ...

    Options are those of `zoo.generate`; tokens that presence and frequency penalties count are those of a turn. A turn
    draws with a key of its own, folded from `key` by its number. An `ImageText` reads images with a text.

    **Raises** as `zoo.generate` does.
    """

    @check_keywords
    def __init__(
        self,
        model: Decoder | ImageText,
        *,
        mesh: Mesh | None = None,
        key: Key[Array, ""] | None = None,
        **options: Unpack[SamplingOptions],
    ):
        sampling = Sampling(**options)
        request.check_temperature(sampling.temperature, key)
        request.check_mesh(mesh, model)
        self._whole = model
        if isinstance(model, ImageText):
            model = model.decoder
        request.check_decoder(model)
        self._vocab, _ = model.embedding.table_shape
        self._mesh = drop_sequence_parallelism(mesh)
        self._options = DecodeOptions.of(sampling, self._vocab, self._mesh)
        self._key = jax.random.key(0) if key is None else wrap_key(key)
        self._model = model
        self._unstacked = unstack_layers(model, self._mesh)
        self._rereads = bool(find_rope_switches(model))
        self._turns = 0
        self._length = 0
        self._state: DecodeState | None = None
        self._held: list[int] = []
        self._images: Any = None
        self._newest = -1

    @property
    def held(self) -> tuple[int, ...]:
        """The tokens that the states hold."""
        return tuple(self._held)

    def stream(self, tokens: Sequence[int], *, max_new_tokens: int, images: Any = None) -> Generator[int, None, None]:
        """Yield the tokens that follow `tokens`, the whole text so far, one by one as they are computed, up to a stop
        token.

        If the text begins with the tokens that are held, only the others are read; else, or if the caches are too
        short for the new tokens, all of them. Rope scaling that switches frequencies at a length reads all of them,
        too. Iteration may end early: the next turn goes on behind the tokens that were yielded.

        - `images`: the images of the whole text, of one row, as the model takes them. They are not read again if they
          are the same object as in the turn before, and the text goes on. A text with other images is read anew.

        **Raises** `NotImplementedError` for a model that reads its whole prompt in both directions (PaliGemma): no turn
        follows another.
        """
        text = jnp.asarray([list(tokens)], jnp.int32)
        request.check_prompt(text, None, self._vocab)
        self._check_images(text, images)
        known = len(self._held)
        length = choose_cache_length(self._model, text.shape[1], max_new_tokens, None)
        goes_on = 0 < known < text.shape[1] and list(tokens[:known]) == self._held and not self._rereads
        goes_on = goes_on and images is self._images
        if not goes_on or length > self._length:
            self._state = None
            self._length = length
            known = 0
        unread = jnp.asarray([list(tokens[known:])], jnp.int32)  # from the host: a slice would compile for each length
        rows = choose_rows(self._model, 1, self._mesh)
        fixed = self._model, self._options, jax.random.fold_in(self._key, self._turns)
        self._turns += 1
        state = self._state
        self._state = None  # donated
        self._held = []
        self._images = images
        if state is None and images is not None and isinstance(self._whole, ImageText):
            reading = {"new": max_new_tokens, "length": None, "samples": 1, "mesh": self._mesh}
            last, prefix = read_images(self._whole, unread, images, None, **reading)
            prompt = pad_after(prefix, last, None, rows, self._length, self._mesh, 0)
            state = run_jitted(on_mesh(begin, self._mesh), fixed, (prompt, self._length, prefix))
        elif state is None:
            prompt = pad_prompt(unread, None, rows, self._length, self._mesh)
            state = run_jitted(on_mesh(begin, self._mesh), fixed, (prompt, self._length))
        else:
            prompt = pad_prompt(unread, None, rows, self._length, self._mesh, 0, known)
            dropped = jax.device_put(np.int32(-1 if self._newest in tokens else self._newest))
            args = state, prompt, dropped, self._length
            state = run_jitted(on_mesh(read_on, self._mesh), fixed, args, donate=True)
        decode = on_mesh(decode_until, self._mesh)
        fixed = self._unstacked, self._options
        held = list(tokens[:-1])
        newest = tokens[-1]
        for count in range(1, max_new_tokens + 1):
            args = state, jax.device_put(np.int32(count))
            state = run_jitted(decode, fixed, args, donate=True)
            held.append(int(newest))
            self._state = state
            self._held = held
            newest, running = jax.device_get((state.newest[0], state.running))
            if newest < 0:
                raise ValueError(request.describe_non_finite("logits", count - 1))
            self._newest = int(newest)
            yield int(newest)
            if not running:
                return

    def _check_images(self, text: Int[Array, "1 text"], images: Any) -> None:
        """**Raises** as `stream` does for images."""
        check_texts(self._whole, text, images)
        if reads_prefix(self._whole):
            raise NotImplementedError(
                "this model reads its prompt in both directions, and an answer by its words before: "
                "zoo.generate(model, tokens, images=images) answers once"
            )
