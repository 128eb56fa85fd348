"""Implement `zoo generate`."""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import zoo
from zoo._compile_cache import enable_compile_cache
from zoo._terminal import show
from zoo.generate.request import check_decoder
from zoo.parallel.devices import make_device_mesh
from zoo.text.batches import pad_left
from zoo.text.stream_decoder import StoppingDecoder
from zoo.text.tokenizer_file import TOKENIZER_FILE
from zoo.text.tokenizers import Tokenizer, find_language_token, find_tokenizer
from zoo.weights.directory import resolve_directory
from zoo.weights.generation_config import read_stop_tokens

from .pictures import Pictures, read_pictures
from .sampling_flags import SamplingFlags

_GREEDY = SamplingFlags(temperature=0.0)


def generate(
    directory: Annotated[Path, tyro.conf.Positional],
    words: tyro.conf.Positional[tuple[str, ...]] = (),
    *,
    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = (),
    tokens: Annotated[tyro.conf.UseAppendAction[tuple[tuple[int, ...], ...]], tyro.conf.arg(metavar="ID ...")] = (),
    image: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")] = (),
    max_new_tokens: int = 64,
    sampling: Annotated[SamplingFlags, tyro.conf.OmitArgPrefixes] = _GREEDY,
    samples: int = 1,
    seed: int = 0,
    stop_token: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="ID ...")] = None,
    stop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = (),
    draft: Annotated[str | None, tyro.conf.arg(metavar="DIRECTORY|prompt|mtp")] = None,
    draft_tokens: int | None = None,
    language: Annotated[str | None, tyro.conf.arg(metavar="CODE")] = None,
    no_stream: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    no_compile_cache: bool = False,
) -> None:
    """Generate text from prompts: zoo generate DIRECTORY "Once upon a time". A model with an encoder reads the prompt
    as its source, and writes the target.

    Prints the new tokens to standard output: streamed for one prompt, in order for several texts, which form one batch.
    Prompts are used verbatim, without a chat template. Without tokenizer.json, a vocabulary of 256 means bytes; with
    any other vocabulary, tokens are passed and printed as ids.

    Args:
        directory: Checkpoint directory with config.json and safetensors, and tokenizer.json for text prompts; or a name
            on the Hugging Face hub, with @REVISION behind it for another than the newest.
        words: Prompt text, as words after the directory.
        prompt: Prompt text. Repeat for several prompts.
        tokens: Prompt as token ids, used verbatim. Repeat for several prompts.
        image: Picture that a model of images and texts reads with each prompt, at the placeholder there, such as
            <image>, or else before the text. Repeat for several.
        max_new_tokens: Maximum number of new tokens per prompt.
        sampling: How tokens are drawn.
        samples: Number of texts per prompt, which is read once.
        seed: Random seed of the samples.
        stop_token: Token ids that end a text. Default: eos_token_id of generation_config.json or config.json. Pass the
            flag without ids for none.
        stop: Text that ends a text, and is left out. It may spell special tokens. Repeat for several.
        draft: Checkpoint directory or name of a smaller model of the same vocabulary, which proposes tokens, or
            "prompt" to look them up in the text so far. Not streamed.
        draft_tokens: Number of tokens that a draft proposes at a time.
        language: Of a model with an encoder, the language that the target is written in, as the tokenizer spells it:
            fra_Latn, fr_XX, fr.
        no_stream: Print at the end, and generate in one program, which is faster. Has no effect with --stop.
        dtype: Dtype of the parameters and the computation. Default: as stored.
        data: Data parallelism: number of devices that shard the prompts. -1 for all remaining devices.
        fsdp: Fully sharded data parallelism: number of devices that shard the parameters and the prompts.
        expert: Expert parallelism: devices that share the experts of mixtures out, and the rows.
        context: Context parallelism: number of devices that share KV caches and read a prompt together.
        tensor: Tensor parallelism: number of devices that shard heads, MLP and vocabulary.
        pipe: Pipeline parallelism: refused above 1, since stages keep no caches. zoo evaluate takes it.
        no_compile_cache: Compile anew: neither read compiled programs from the user's cache folder nor keep them there.
    """
    if not no_compile_cache:
        enable_compile_cache()
    if (given := sum(map(bool, (words, prompt, tokens)))) != 1:
        end = ", not both" if given else ""
        raise ValueError(
            f'pass the prompt as words after the directory, "Once upon a time", as --prompt or as --tokens{end}'
        )
    if pipe != 1:  # before minutes of loading
        raise NotImplementedError(
            f"zoo generate does not shard layers, and --pipe {pipe} asks for it: decode with --pipe 1, on data, fsdp, "
            "expert, context and tensor"
        )
    if words:
        prompt = (" ".join(words),)
    path = resolve_directory(directory)
    pictures = read_pictures(path, image)
    stops = read_stop_tokens(path) if stop_token is None else stop_token
    mesh = make_device_mesh(data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor, pipe=pipe)
    model = zoo.load(path, mesh=mesh, dtype=dtype)
    reads_source = isinstance(model, zoo.models.EncoderDecoder)
    decoder = model.decoder if isinstance(model, zoo.models.EncoderDecoder | zoo.models.ImageText) else model
    if reads_source and not model.reads_tokens:
        raise ValueError(f"{directory} reads audio: in Python, zoo.generate with zoo.audio.log_mel_features")
    check_decoder(decoder)
    vocab, _ = decoder.embedding.table_shape
    text = find_tokenizer(path, vocab)
    encode = functools.partial(_encode_prompt, text, directory=path, with_end=reads_source, pictures=pictures)
    prompts = list(tokens) or [encode(each) for each in prompt]
    if language is not None:
        model = _begin_with_language(model, language, text)
    if not all(prompts):
        raise ValueError("a prompt needs at least one token: --tokens 3 5 7")
    batch, mask = pad_left(prompts)
    padding_mask = None if mask.all() else jnp.asarray(mask)
    if stop_token is None:
        stops = [token for token in stops if token < vocab]
    if stop and text is None:
        raise ValueError(f"--stop is text, and {directory} has no {TOKENIZER_FILE}: pass token ids, --stop-token 3")
    printer = _TokenPrinter(text, prompts, samples, stop)
    is_streamed = draft is None and (bool(stop) or not no_stream)
    more: dict[str, Any] = {}
    if pictures is not None:
        more["images"] = zoo.images.join_rows([pictures.processed] * len(prompts))
    if draft is not None:
        more |= {"draft": draft, "draft_tokens": draft_tokens}
        if draft not in ("prompt", "mtp"):
            more["draft"] = zoo.load(resolve_directory(draft), mesh=mesh, dtype=dtype)
    new = zoo.generate(
        model,
        jnp.asarray(batch),
        mask=padding_mask,
        max_new_tokens=max_new_tokens,
        **vars(sampling),
        samples=samples,
        stop_tokens=stops,
        mesh=mesh,
        callback=printer.push if is_streamed else None,
        key=jax.random.key(seed),
        **more,
    )
    if not is_streamed:
        printer.push_all(np.asarray(new))
    printer.close()


def _begin_with_language(model: Any, language: str, text: Tokenizer | None) -> Any:
    """Return a model whose targets begin with the token of a language.

    **Raises** `ValueError` for a model without an encoder, and for a language that its tokenizer does not have.
    """
    if not isinstance(model, zoo.models.EncoderDecoder) or text is None:
        raise ValueError(f"--language {language} begins the target of a model with an encoder and a tokenizer")
    return dataclasses.replace(model, start=(*model.start[:1], find_language_token(text, language), *model.start[2:]))


def _encode_prompt(
    text: Tokenizer | None, prompt: str, directory: Path, *, with_end: bool, pictures: Pictures | None
) -> tuple[int, ...]:
    """Tokenize a prompt; `with_end` as the source of an encoder. **Raises** `ValueError` without a tokenizer, for a
    prompt without tokens, and for one whose placeholders are not `pictures`."""
    if text is None:
        raise ValueError(f"{directory} has no {TOKENIZER_FILE}: pass token ids, --tokens 3 5 7")
    if pictures is not None:
        return pictures.encode(prompt, text)
    tokens = (*text.prefix, *text.encode(prompt).tolist())
    if with_end:
        tokens += text.suffix
    if not tokens:
        raise ValueError("a prompt needs at least one token: this one is empty, and the tokenizer has no prefix")
    return tokens


class _TokenPrinter:
    """Prints tokens as they are generated, and at the end tokens per second, without the first two, which compile."""

    def __init__(self, text: Tokenizer | None, prompts: Sequence[Sequence[int]], samples: int, stop: Sequence[str]):
        decode = text.decode if text else _format_token_ids
        special_tokens = text.special_tokens if text else {}
        self._streams = [
            StoppingDecoder(decode, prompt, stop, special_tokens) for prompt in prompts for _ in range(samples)
        ]
        self._samples = samples
        self._pieces: list[list[str]] = [[] for _ in self._streams]
        self._start = time.perf_counter()
        self._steps: list[tuple[float, int]] = []

    def push(self, newest: np.ndarray) -> np.ndarray:
        """Print the latest token of each row, -1 for none; return the rows that end with a stop string."""
        self._steps.append((time.perf_counter(), int((newest >= 0).sum())))
        self._add(newest)
        if len(self._streams) == 1:
            show("".join(self._pieces[0]), end="")
            self._pieces[0].clear()
        return np.array([stream.ended for stream in self._streams])

    def push_all(self, new: np.ndarray) -> None:
        """Add all new tokens at once, -1 for none."""
        self._steps.append((time.perf_counter(), int((new >= 0).sum())))
        for newest in new.T:
            self._add(newest)

    def _add(self, newest: np.ndarray) -> None:
        for stream, pieces, token in zip(self._streams, self._pieces, newest.tolist(), strict=True):
            if token >= 0:
                pieces.append(stream.push(token))

    def close(self) -> None:
        """Print the rest of the text, and the timings."""
        for number, (stream, pieces) in enumerate(zip(self._streams, self._pieces, strict=True)):
            if len(self._streams) > 1:
                show(f"--- {self._name(number)}")
            show("".join(pieces) + stream.flush())
        seconds = [when - self._start for when, _ in self._steps]
        counts = [count for _, count in self._steps]
        noun = "tokens" if sum(counts) > 1 else "token"
        what = "all" if len(seconds) == 1 and sum(counts) > 1 else "the first"
        summary = f"{sum(counts)} {noun}; {what} after {seconds[0]:.2f} s"
        if len(seconds) > 2:
            summary += f", then {sum(counts[2:]) / (seconds[-1] - seconds[1]):.1f} tokens/s"
        show(summary, file=sys.stderr)

    def _name(self, number: int) -> str:
        """Return the number of a text: of its prompt, or of its sample, or both as 2.1."""
        prompt, sample = divmod(number, self._samples)
        if len(self._streams) == self._samples:
            return str(sample + 1)
        if self._samples == 1:
            return str(prompt + 1)
        return f"{prompt + 1}.{sample + 1}"


def _format_token_ids(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)
