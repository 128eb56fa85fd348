"""Answer the requests of evaluations: log-likelihoods of continuations, of whole texts, and generated texts."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo.models import Decoder
from zoo.parallel import Mesh, reader
from zoo.parallel.batch import fetch_arrays, place_batch
from zoo.parallel.spmd import spmd
from zoo.text.chat.template import ChatTemplate
from zoo.text.tokenizers import Tokenizer

from .generation import GenerationOptions, generate_texts
from .progress import show_progress
from .rows import pad_rows, split_rolling
from .scores import score_targets

_SHORTEST = 16
"""Smallest number of tokens that rows are padded to: shorter ones would only compile more programs."""


class LogLikelihood(NamedTuple):
    """The score of a continuation."""

    log_likelihood: float
    """log p(continuation | context), a sum over tokens in float64."""
    is_greedy: bool
    """True if greedy decoding gives the continuation: each token is the argmax of its logits."""


class TextPrompt(NamedTuple):
    """A prompt to continue, with options of its own."""

    tokens: Sequence[int]
    options: GenerationOptions


class LanguageModel:
    """A model and its tokenizer, as evaluations ask them: scores and texts for any number of requests, on any mesh.

        lm = LanguageModel(model, tokenizer, mesh, batch=8, length=2048, prefix_token=0)
        lm.log_likelihoods([lm.encode_pair("The river was", " wide")])  # [LogLikelihood(-0.05, True)]

    - `mesh`: the mesh of the model; None for one device.
    - `batch`: rows of a program over all devices, rounded up to what the mesh divides.
    - `length`: most tokens that the model reads at a time. Longer requests lose tokens on the left. Rounded down to
      what a `context` axis divides.
    - `prefix_token`: token before a text that has no context (BOS, or EOS without one); the tokenizer's separator by
      default.
    - `stop_tokens`: tokens that end a generated text.
    - `template`: the chat template, for evaluations that ask for it.
    - `progress`: show a bar on a terminal.

    Each request is a row of its own, padded on the right, the longest first, to a power of two tokens: few programs are
    compiled. Logits stay on the devices, sharded: two numbers per token leave them.

    With several processes all of them make the same calls and get all results. Each scores the rows that
    `zoo.parallel.reader` gives it.

    **Raises** `ValueError` for a batch below 1, and for a length below 2 tokens per device.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        mesh: Mesh | None = None,
        *,
        batch: int = 8,
        length: int = 2048,
        prefix_token: int | None = None,
        stop_tokens: Sequence[int] = (),
        template: ChatTemplate | None = None,
        progress: bool = False,
    ):
        row_shards = 1 if mesh is None else mesh.count_shards("batch")
        self._token_shards = 1 if mesh is None else mesh.count_shards("seq")
        if batch < 1:
            raise ValueError(f"batch is a number of rows, at least 1, not {batch}")
        if length < 2 * self._token_shards:
            raise ValueError(
                f"length is a number of tokens, at least 2 for each of {self._token_shards} devices along the "
                f"sequence, not {length}"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.template = template
        self.prefix_token = tokenizer.separator if prefix_token is None else prefix_token
        self.length = length // self._token_shards * self._token_shards
        self.stop_tokens = tuple(stop_tokens)
        self.progress = progress
        self._rows = -(-batch // row_shards) * row_shards
        if mesh is None:
            self._score = _score_on_one_device
        else:
            self._score = spmd(score_targets, mesh, out=("batch seq", "batch seq", "batch"))

    def require_template(self) -> ChatTemplate:
        """Return the chat template. **Raises** `ValueError` without one."""
        if self.template is None:
            raise ValueError("a chat was asked for, and there is no chat template: load the model with chat=True")
        return self.template

    def encode(self, text: str) -> list[int]:
        """Tokenize a text behind the tokenizer's prefix, which a rendered chat may begin with already."""
        tokens = self.tokenizer.encode(text).tolist()
        prefix = list(self.tokenizer.prefix)
        if tokens[: len(prefix)] == prefix:
            return tokens
        return [*prefix, *tokens]

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokenize a context and its continuation as one text, and cut it behind the context's tokens.

        Spaces that end the context belong to the continuation, as in most vocabularies to the word behind them.
        Without a context the prefix token stands for it. It is lm_eval's rule.
        """
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if not stripped:
            tokens = self.tokenizer.encode(continuation).tolist()
            if tokens[:1] == [self.prefix_token]:
                return tokens[:1], tokens[1:]
            return [self.prefix_token], tokens
        context_tokens = self.encode(stripped)
        return context_tokens, self.encode(stripped + continuation)[len(context_tokens) :]

    def log_likelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[LogLikelihood]:
        """Compute log p(continuation | context) of each pair of tokens.

        **Raises** `ValueError` for a pair without context or continuation, a continuation longer than `length`, a token
        that the model does not know, and a score that is not a number.
        """
        rows = [self._join(number, *pair) for number, pair in enumerate(pairs)]
        results: list[Any] = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), rows[i]))
        with show_progress(len(rows), "log-likelihoods", shown=self.progress) as advance:
            for start in range(0, len(order), self._rows):
                numbers = order[start : start + self._rows]
                scores, is_likeliest = self._score_rows([rows[i] for i in numbers])
                for i, row_scores, row_flags in zip(numbers, scores, is_likeliest, strict=False):
                    _, continuation = pairs[i]
                    scored = slice(len(rows[i]) - 1 - len(continuation), len(rows[i]) - 1)
                    total = float(row_scores[scored].astype(np.float64).sum())
                    if math.isnan(total):
                        raise ValueError(f"request {i}: its log-likelihood is not a number: try --dtype float32")
                    results[i] = LogLikelihood(total, bool(row_flags[scored].all()))
                advance(len(numbers))
        return results

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Compute log p(text) of each text, every token once, in windows of `length` tokens (`split_rolling`)."""
        owners = []
        windows = []
        for number, text in enumerate(texts):
            for window in split_rolling(self.encode(text), self.prefix_token, self.length):
                owners.append(number)
                windows.append(window)
        totals = [0.0] * len(texts)
        for number, score in zip(owners, self.log_likelihoods(windows), strict=True):
            totals[number] += score.log_likelihood
        return totals

    def generate(self, prompts: Sequence[TextPrompt]) -> list[str]:
        """Continue each prompt; return the new text, up to its first stop string or stop token.

        Prompts of equal options share batches, padded on the left. A prompt loses tokens on the left where `length` has
        no room for the new ones.

        **Raises** `ValueError` for an empty prompt, and for options that leave no room for a prompt;
        `NotImplementedError` on a mesh with `pipe`.
        """
        if self.mesh is not None and self.mesh.shape["pipe"] > 1:
            raise NotImplementedError(
                "texts cannot be generated on a mesh with pipe, since stages keep no caches: use data, fsdp, expert, "
                "context and tensor"
            )
        rows = [self._truncate(number, prompt) for number, prompt in enumerate(prompts)]
        texts = [""] * len(prompts)
        with show_progress(len(prompts), "texts", shown=self.progress) as advance:
            for numbers in self._batch_by_options(prompts):
                found = generate_texts(
                    self.model,
                    self.tokenizer,
                    [rows[i] for i in numbers],
                    prompts[numbers[0]].options,
                    number=numbers[0],
                    stop_tokens=self.stop_tokens,
                    mesh=self.mesh,
                )
                for i, text in zip(numbers, found, strict=True):
                    texts[i] = text
                advance(len(numbers))
        return texts

    def _join(self, number: int, context: Sequence[int], continuation: Sequence[int]) -> list[int]:
        """Return the tokens of a pair: those that the model reads, and the last target behind them."""
        if not len(context) or not len(continuation):
            raise ValueError(
                f"request {number}: context and continuation need at least one token each, and they have "
                f"{len(context)} and {len(continuation)}"
            )
        if len(continuation) > self.length:
            raise ValueError(
                f"request {number}: its continuation has {len(continuation)} tokens, and the model reads {self.length} "
                "at a time: pass a greater length, or a shorter text"
            )
        row = [*context, *continuation][-(self.length + 1) :]
        vocab, _ = self.model.embedding.table_shape
        if max(row) >= vocab:
            raise ValueError(
                f"request {number}: the tokenizer gives token {max(row)}, and the model's vocabulary has {vocab}: they "
                "are not of one checkpoint"
            )
        return row

    def _truncate(self, number: int, prompt: TextPrompt) -> list[int]:
        room = self.length - prompt.options.max_new_tokens
        if room < 1:
            raise ValueError(
                f"request {number}: {prompt.options.max_new_tokens} new tokens leave no room for a prompt within "
                f"{self.length}: pass a greater length, or ask for fewer tokens"
            )
        if not len(prompt.tokens):
            raise ValueError(f"request {number}: a prompt needs at least one token, and the tokenizer has no prefix")
        return list(prompt.tokens)[-room:]

    def _batch_by_options(self, prompts: Sequence[TextPrompt]) -> Iterator[list[int]]:
        """Yield the numbers of prompts that share a batch: of equal options, the longest first."""
        groups: dict[GenerationOptions, list[int]] = {}
        for number, prompt in enumerate(prompts):
            groups.setdefault(prompt.options, []).append(number)
        for numbers in groups.values():
            numbers.sort(key=lambda i: (-len(prompts[i].tokens), i))
            for start in range(0, len(numbers), self._rows):
                yield numbers[start : start + self._rows]

    def _score_rows(self, rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return log p of each token but the first of each row, and whether it is the likeliest."""
        batch = pad_rows(rows, self._rows, self._choose_length(max(map(len, rows)) - 1))
        if self.mesh is None:
            placed = jax.tree.map(jnp.asarray, batch)
        else:
            index, count = reader(self.mesh)
            own = slice(index * self._rows // count, (index + 1) * self._rows // count)
            placed = place_batch({name: x[own] for name, x in batch.items()}, self.mesh)
        scores, is_likeliest, numbers = fetch_arrays(self._score(self.model, placed))
        order = np.argsort(numbers)
        return scores[order], is_likeliest[order]

    def _choose_length(self, tokens: int) -> int:
        """Return the next power of two, which `length` and the mesh bound."""
        power = max(_SHORTEST, 1 << (tokens - 1).bit_length())
        return min(-(-power // self._token_shards) * self._token_shards, self.length)


_score_on_one_device = eqx.filter_jit(score_targets)
