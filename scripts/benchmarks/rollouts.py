"""Entrants of decoding for rollouts: many rows after one prompt, and drafts, ours and transformers'.

Both libraries have the same weights: ours are saved as a Llama, which transformers opens. So greedy texts are the same,
and a draft has as many of its tokens accepted. A random model soon repeats itself, which is the best case for prompt
lookup: the names say how many calls of the model the tokens took.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zoo
from zoo.models.stack import swap_stack

from .entrants import Entrants, Row, name_rivals
from .ours import Sizes

PROMPT, NEW, ROWS = 512, 64, 8
DRAFTED = 4
"""Tokens that a draft proposes at a time."""
_BLOCK = 32
"""Tokens of the prompt that repeat, for prompt lookup."""


@dataclasses.dataclass
class Rollout:
    """A call of `zoo.generate`, which blocks until the tokens are there."""

    generate: Callable[[], Any]

    def __call__(self) -> None:
        jax.block_until_ready(self.generate())


def rollouts(vs: str) -> Entrants:
    """Return the entrants, and the tokens of each."""
    sizes = Sizes()
    stacked = [dataclasses.replace(sizes, layers=layers).make(jax.random.key(0)) for layers in (sizes.layers, 1)]
    model, draft = (swap_stack(each, zoo.models.Stack.unstack) for each in stacked)  # once, for many calls
    shared = jax.random.randint(jax.random.key(1), (1, PROMPT), 0, sizes.vocab)
    questions = jax.random.randint(jax.random.key(2), (ROWS, 8), 0, sizes.vocab)
    texts = jnp.concatenate([jnp.repeat(shared, ROWS, 0), questions], axis=1)
    repeated = jnp.tile(shared[:, :_BLOCK], (1, PROMPT // _BLOCK))
    prefix = zoo.prefill(model, shared, length=1024)
    decode = functools.partial(zoo.generate, max_new_tokens=NEW)
    sample = functools.partial(decode, temperature=1.0, key=jax.random.key(3))
    entrants: dict[str, Callable] = {
        f"zoo, {ROWS} texts after a prefix": Rollout(lambda: decode(model, questions, prefix=prefix)),
        f"zoo, {ROWS} texts read each": Rollout(lambda: decode(model, texts)),
        f"zoo, {ROWS} samples": Rollout(lambda: sample(model, shared, samples=ROWS)),
        f"zoo, {ROWS} samples read each": Rollout(lambda: sample(model, jnp.repeat(shared, ROWS, 0))),
        "zoo, one text": Rollout(lambda: decode(model, repeated)),
    }
    for name, proposer in (("prompt lookup", "prompt"), ("a draft model", draft)):
        options = {"draft": proposer, "draft_tokens": DRAFTED}
        steps = int(decode(model, repeated, details=True, **options).steps)
        entrants[f"zoo, {name}, {steps} steps"] = Rollout(functools.partial(decode, model, repeated, **options))
    if vs == "torch":
        entrants |= _make_rivals(stacked, shared, questions, repeated)
    facts: dict[str, Row] = {name: {"tokens": NEW * (ROWS if str(ROWS) in name.split() else 1)} for name in entrants}
    for kind in ("8 texts", "8 samples", "one text", "prompt lookup", "a draft model"):
        name_rivals(facts, f"zoo, {kind}", f"transformers, {kind}")
    return entrants, facts


def _make_rivals(models: list[zoo.models.Decoder], shared: Any, questions: Any, repeated: Any) -> dict[str, Callable]:
    from . import pytorch

    with tempfile.TemporaryDirectory() as folder:
        opened = []
        for number, model in enumerate(models):
            directory = Path(folder) / str(number)
            zoo.save(model, directory, family="llama")
            opened.append(pytorch.open_checkpoint(directory))
    arrays = [np.array(x) for x in (shared, questions, repeated)]
    rivals = pytorch.Rollouts(*opened, *arrays, new=NEW, drafted=DRAFTED)
    return {
        f"transformers, {ROWS} texts after a prefix": rivals.follow_prefix,
        f"transformers, {ROWS} texts read each": rivals.read_each,
        f"transformers, {ROWS} samples": rivals.sample,
        "transformers, one text": rivals.decode,
        "transformers, prompt lookup": rivals.look_up,
        "transformers, a draft model": rivals.speculate,
    }
