"""Batches in which a model has written the texts itself, for on-policy distillation."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, Shaped

from zoo._checks import check_temperature
from zoo.generate.run import generate
from zoo.models import Decoder
from zoo.parallel import Mesh, reader
from zoo.parallel.batch import fetch_arrays, place_batch

from .reinforcement.rollouts import make_rows

_Batch = dict[str, Shaped[np.ndarray, "batch seq"]]


def sample_batch(
    model: Decoder,
    batch: Mapping[str, Shaped[np.ndarray, "batch seq"]],
    *,
    max_new_tokens: int,
    mesh: Mesh,
    temperature: float = 1.0,
    stop_tokens: Sequence[int] = (),
    key: Key[Array, ""],
) -> _Batch:
    """Let a model continue the prompt of each row; return rows of the same shape, with weight 1 on sampled tokens.

    - `batch`: on the host, rows of one text each, as records with `pack=False` have them. The prompt of a row is what
      comes before the first target with a weight; its last `seq - max_new_tokens` tokens if it is longer. A row of
      which all is trained on, or the first target, is a text: its first `seq - max_new_tokens` tokens are the prompt.
    - `max_new_tokens`: less than the length of a row.
    - `temperature`: tokens are drawn from softmax(logits / temperature).
    - `stop_tokens`: end a text, and are trained on.

    With several processes each passes its own rows, `zoo.parallel.reader(mesh)`, and gets them back.

    **Raises** `ValueError` for `max_new_tokens` outside of 1 to the length of a row less 1, and for a temperature that
    is not above 0.
    """
    width = batch["tokens"].shape[1]
    if not 1 <= max_new_tokens < width:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: rows of {width} tokens hold a prompt and 1 to {width - 1} new tokens"
        )
    check_temperature(temperature)
    prompts, mask = _find_prompts(batch, width - max_new_tokens)
    options = {"temperature": temperature, "stop_tokens": stop_tokens, "mesh": mesh, "key": key}
    index, count = reader(mesh)
    if count > 1:  # every process samples all rows
        placed = fetch_arrays(place_batch({"tokens": prompts, "mask": mask}, mesh))
        prompts = placed["tokens"]
        mask = placed["mask"]
    made = generate(model, jnp.asarray(prompts), mask=jnp.asarray(mask), max_new_tokens=max_new_tokens, **options)
    new = fetch_arrays(made)
    texts = [(prompts[row][mask[row]], new[row][new[row] >= 0]) for row in range(len(new))]
    size = len(prompts) // count
    return make_rows(texts[index * size : (index + 1) * size], width)


def _find_prompts(
    batch: Mapping[str, Shaped[np.ndarray, "batch seq"]], longest: int
) -> tuple[Int[np.ndarray, "batch prompt"], Shaped[np.ndarray, "batch prompt"]]:
    """Return the prompts, padded on the left, and where they have a token."""
    prompts = np.zeros((len(batch["tokens"]), longest), np.int32)
    mask = np.zeros(prompts.shape, bool)
    is_trained = (batch["targets"] >= 0) & (batch.get("weights", np.ones(batch["targets"].shape)) > 0)
    for row, tokens in enumerate(np.asarray(batch["tokens"])):
        text_length = max(int((batch["targets"][row] >= 0).sum()), 1)
        length = int(is_trained[row].argmax()) + 1
        if length == 1:  # a text, or a row of padding
            length = min(longest, text_length)
        prompt = tokens[:length][-longest:]
        prompts[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = True
    return prompts, mask
