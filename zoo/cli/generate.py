"""`zoo generate`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import zoo
from zoo.text.checkpoint_tokenizers import TOKENIZER_FILE, CheckpointTokenizer, StreamDecoder, find_tokenizer
from zoo.weights.resolve import CONFIG_NAME, resolve_directory
from zoo.weights.safetensors import read_json

from .devices import make_device_mesh

_GENERATION_CONFIG_FILE = "generation_config.json"


def generate(
    directory: Annotated[Path, tyro.conf.Positional],
    *,
    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = (),
    tokens: Annotated[tyro.conf.UseAppendAction[tuple[tuple[int, ...], ...]], tyro.conf.arg(metavar="ID ...")] = (),
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop_token: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="ID ...")] = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
) -> None:
    """Let a checkpoint continue a text.

    What is new goes to standard output: as it comes for one prompt, one after another for several, which are computed
    as one batch. Prompts are taken as they are: no chat template is put around them. Without a tokenizer.json a
    vocabulary of 256 is taken for bytes, and for any other one tokens are given, and printed, as numbers.

    Args:
        directory: Holds config.json and safetensors, and tokenizer.json where prompts are text.
        prompt: What to continue; may be given several times.
        tokens: The same as ids of tokens, taken as they are; may be given several times.
        max_new_tokens: New tokens of each prompt at most.
        temperature: 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature).
        top_k: Draw from this many likeliest tokens.
        top_p: Draw from the likeliest tokens that together have this probability, above 0 and at most 1.
        min_p: Draw from tokens that are this likely, relative to the likeliest; from 0 to 1.
        repetition_penalty: Above 1, makes tokens less likely that occurred before.
        seed: Of what is drawn.
        stop_token: Ids that end a text. Those of eos_token_id in generation_config.json or config.json unless given;
            none where nothing follows the flag.
        dtype: What the model is read as and computes in; as it is stored unless given.
        data: Devices that share the prompts; -1 for all that remain.
        fsdp: Devices that share each copy of the parameters.
        tensor: Devices that share heads, MLP and vocabulary.
    """
    if bool(prompt) == bool(tokens):
        raise ValueError("give what to continue as --prompt or as --tokens" + (", not both" if prompt else ""))
    path = resolve_directory(directory)
    mesh = make_device_mesh(data=data, fsdp=fsdp, tensor=tensor)
    model = zoo.load(path, mesh=mesh, dtype=dtype)
    vocab, _ = model.embedding.table_shape
    text = find_tokenizer(path, vocab)
    prompts = list(tokens) or [_encode_prompt(text, each, path) for each in prompt]
    stops = [token for token in read_stop_tokens(path) if token < vocab] if stop_token is None else stop_token
    batch, mask = pad_left(prompts)
    shown = _TokenPrinter(text, prompts)
    zoo.generate(
        model,
        jnp.asarray(batch),
        mask=None if mask.all() else jnp.asarray(mask),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop_tokens=stops,
        mesh=mesh,
        callback=shown.push,
        key=jax.random.key(seed) if temperature else None,
    )
    shown.close()


def _encode_prompt(text: CheckpointTokenizer | None, prompt: str, directory: Path) -> tuple[int, ...]:
    """The tokens of a prompt. **Raises** `ValueError` where there is no tokenizer, or no token."""
    if text is None:
        raise ValueError(f"{directory} has no {TOKENIZER_FILE}: give ids of tokens, --tokens 3 5 7")
    found = (*text.prefix, *text.encode(prompt)[0].tolist())
    if not found:
        raise ValueError("a prompt needs at least one token: this one is empty, and the tokenizer puts none before it")
    return found


def read_stop_tokens(directory: Path) -> list[int]:
    """What ends a text, as the checkpoint says it: one id, several, or none."""
    for name in (_GENERATION_CONFIG_FILE, CONFIG_NAME):
        if (directory / name).is_file():
            found = read_json(directory / name).get("eos_token_id")
            found = found if isinstance(found, list) else [found]
            if found := [token for token in found if isinstance(token, int)]:
                return found
    return []


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as one batch, and where it is real. **Raises** `ValueError` for one without tokens."""
    if not all(prompts):
        raise ValueError("a prompt needs at least one token: --tokens 3 5 7")
    longest = max(map(len, prompts))
    batch = np.array([(0,) * (longest - len(row)) + tuple(row) for row in prompts])
    return batch, np.arange(longest) >= longest - np.array([len(row) for row in prompts])[:, None]


class _TokenPrinter:
    """Prints what comes, and at the end how fast it came: the tokens after the second, by when all is compiled."""

    def __init__(self, text: CheckpointTokenizer | None, prompts: Sequence[Sequence[int]]):
        decode = text.decode if text else _format_token_ids
        self._streams = [StreamDecoder(decode, prompt) for prompt in prompts]
        self._pieces: list[list[str]] = [[] for _ in prompts]
        self._start = time.perf_counter()
        self._steps: list[tuple[float, int]] = []

    def push(self, newest: np.ndarray) -> None:
        """The newest token of each row, -1 for none."""
        self._steps.append((time.perf_counter(), int((newest >= 0).sum())))
        for stream, pieces, token in zip(self._streams, self._pieces, newest.tolist(), strict=True):
            if token >= 0:
                pieces.append(stream.push(token))
        if len(self._streams) == 1:
            print(self._pieces[0].pop() if self._pieces[0] else "", end="", flush=True)

    def close(self) -> None:
        for number, (stream, pieces) in enumerate(zip(self._streams, self._pieces, strict=True), start=1):
            if len(self._streams) > 1:
                print(f"--- {number}")
            print("".join(pieces) + stream.flush())
        seconds = [when - self._start for when, _ in self._steps]
        counts = [count for _, count in self._steps]
        told = f"{sum(counts)} token{'s' if sum(counts) > 1 else ''}; the first after {seconds[0]:.2f} s"
        if len(seconds) > 2:
            told += f", then {sum(counts[2:]) / (seconds[-1] - seconds[1]):.1f} tokens/s"
        print(told, file=sys.stderr)


def _format_token_ids(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)
