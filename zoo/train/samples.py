"""Continuations of prompts, for reports."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from zoo.generate.run import generate
from zoo.models import Decoder, EncoderDecoder
from zoo.parallel import ZERO3, Mesh
from zoo.parallel.mesh import make_mesh
from zoo.parallel.place import place
from zoo.text.batches import pad_left, spread_rows
from zoo.text.records.records import Records
from zoo.text.run_data import RunData
from zoo.text.stream_decoder import decode_until_stop, end_at_stop

_TEXT_PROMPT = 16  # tokens


class HeldOutPrompt(NamedTuple):
    """A prompt as it is shown, and the tokens that a model continues."""

    text: str
    tokens: Int[np.ndarray, "tokens"]


def continue_prompts(
    model: Decoder | EncoderDecoder,
    data: RunData,
    prompts: Sequence[str | HeldOutPrompt],
    *,
    mesh: Mesh,
    key: Key[Array, ""],
    max_new_tokens: int = 200,
    temperature: float = 0.7,
    samples: int = 1,
    stop: Sequence[str] = (),
) -> list[tuple[str, str]]:
    """Sample a continuation of each prompt in one left-padded batch: (prompt, continuation) pairs. Of chats, the answer
    to each.

    - `prompts`: texts, or prompts of the data (`find_prompts`).
    - `samples`: continuations per prompt, one after the other.
    - `stop`: strings that end a continuation, and are left out; they may spell special tokens. Not with several
      processes, which hold other rows.

    The stages of a pipeline cannot decode: the model is placed on a mesh of the same devices, on which they shard its
    parameters instead.
    """
    asked = [HeldOutPrompt(text, data.encode_prompt(text)) if isinstance(text, str) else text for text in prompts]
    rows = [prompt.tokens for prompt in asked]
    tokens, mask = map(jnp.asarray, pad_left(rows))
    if mesh.shape["pipe"] > 1:
        mesh = _move_stages_to_fsdp(mesh)
        model = place(model, mesh)
    options: dict[str, Any] = {"temperature": temperature, "stop_tokens": data.stop_tokens, "mesh": mesh, "key": key}
    special_tokens = data.tokenizer.special_tokens
    if stop:
        repeated = [row.tolist() for row in rows for _ in range(samples)]
        options["callback"] = end_at_stop(data.tokenizer.decode, repeated, stop, special_tokens)
    new = generate(model, tokens, max_new_tokens=max_new_tokens, mask=mask, samples=samples, **options)
    texts = [decode_until_stop(data.decode, np.asarray(row), stop, special_tokens) for row in new]
    return [(asked[i // samples].text + data.prompt_end, text) for i, text in enumerate(texts)]


def find_prompts(data: Records, count: int = 3) -> list[HeldOutPrompt]:
    """Return up to `count` different prompts of held-out records, from rows spread evenly. Of a plain text it is the
    beginning. **Raises** `ValueError` if none are held out, and `NotImplementedError` for records with images."""
    data.validation.require_rows()
    rows = data.validation.rows
    found = {}
    for index in [*spread_rows(len(rows), 1, count), *range(min(len(rows), 100))]:
        prompt = next((prompt for prompt in _iterate_prompts(data, rows[index]) if prompt.text not in found), None)
        if prompt is not None:
            found[prompt.text] = prompt
        if len(found) == count:
            break
    return list(found.values())


def _iterate_prompts(data: Records, row: Mapping[str, np.ndarray]) -> Iterator[HeldOutPrompt]:
    """Yield the source of a pair, or the prompt of each text of a packed row."""
    if "images" in row:
        raise NotImplementedError("prompts with images are not sampled from records: zoo.generate takes images=")
    if "source" in row:
        tokens = row["source"][row["source_mask"]]
        yield HeldOutPrompt(data.decode_prompt(tokens), tokens)
        return
    for segment in range(row["segment_ids"].max(), 0, -1):  # in a row the longest is first
        is_inside = row["segment_ids"] == segment
        tokens = row["tokens"][is_inside]
        length = int((row["weights"][is_inside] > 0).argmax()) + 1
        if length == 1:
            length = min(_TEXT_PROMPT, len(tokens) // 2 + 1)
        yield HeldOutPrompt(data.decode_prompt(tokens[:length]), tokens[:length])


def _move_stages_to_fsdp(mesh: Mesh) -> Mesh:
    sizes = mesh.shape | {"fsdp": mesh.shape["pipe"] * mesh.shape["fsdp"], "pipe": 1}
    at_rest = {"parameters": ZERO3.parameters, "gradients": None, "optimizer": None}
    layout = dataclasses.replace(mesh.layout, rounds=1, **at_rest)
    return make_mesh(**sizes, devices=list(mesh.devices.devices.flat), layout=layout)
