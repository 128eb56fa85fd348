"""Continuations of prompts, for reports."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from zoo.generate import generate
from zoo.models import Decoder
from zoo.parallel import ZERO3, Mesh, make_mesh, place
from zoo.text.run_data import RunData


def continue_prompts(
    model: Decoder,
    data: RunData,
    prompts: Sequence[str],
    *,
    mesh: Mesh,
    key: Key[Array, ""],
    max_new_tokens: int = 200,
    temperature: float = 0.7,
) -> list[tuple[str, str]]:
    """Sample a continuation of each prompt in one left-padded batch: (prompt, continuation) pairs. Of chats, the answer
    to each.

    The stages of a pipeline cannot decode: the model is placed on a mesh of the same devices, on which they shard its
    parameters instead.
    """
    rows = [data.encode_prompt(prompt) for prompt in prompts]
    length = max(map(len, rows))
    tokens = jnp.asarray([np.pad(row, (length - len(row), 0)) for row in rows])
    mask = jnp.asarray([np.arange(length) >= length - len(row) for row in rows])
    if mesh.shape["pipe"] > 1:
        mesh = _move_stages_to_fsdp(mesh)
        model = place(model, mesh)
    options = {"temperature": temperature, "stop_tokens": data.stop_tokens, "mesh": mesh, "key": key}
    new = generate(model, tokens, max_new_tokens=max_new_tokens, mask=mask, **options)
    return [(prompt + data.prompt_end, data.decode(row)) for prompt, row in zip(prompts, new, strict=True)]


def _move_stages_to_fsdp(mesh: Mesh) -> Mesh:
    sizes = mesh.shape | {"fsdp": mesh.shape["pipe"] * mesh.shape["fsdp"], "pipe": 1}
    at_rest = {"parameters": ZERO3.parameters, "gradients": None, "optimizer": None}
    layout = dataclasses.replace(mesh.layout, rounds=1, **at_rest)
    return make_mesh(**sizes, devices=list(mesh.devices.devices.flat), layout=layout)
