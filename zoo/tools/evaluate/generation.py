"""Generate the texts of an evaluation, up to stop strings."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zoo.generate.run import generate
from zoo.models import Decoder
from zoo.parallel import Mesh
from zoo.parallel.batch import fetch_arrays
from zoo.text.batches import pad_left
from zoo.text.stream_decoder import decode_until_stop, end_at_stop
from zoo.text.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """Options of generated texts, with the names and values of `zoo.generate`."""

    max_new_tokens: int = 256
    until: tuple[str, ...] = ()
    """Strings that end the text, and are left out. They are found in the text, wherever tokens begin and end, and may
    spell special tokens."""
    temperature: float = 0.0
    """0 is greedy decoding."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0


def generate_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    *,
    number: int,
    stop_tokens: Sequence[int],
    mesh: Mesh | None,
) -> list[str]:
    """Continue prompts of equal options in one batch; return the new texts. `number` is the number of the batch, which
    samples depend on.

    A row ends as soon as its text has a stop string. With several processes, which hold other rows, it goes on to a
    stop token or the last token, and the text is cut there.
    """
    tokens, mask = map(jnp.asarray, pad_left(prompts))
    callback = None
    if options.until and jax.process_count() == 1:
        callback = end_at_stop(tokenizer.decode, prompts, options.until, tokenizer.special_tokens)
    new = generate(
        model,
        tokens,
        mask=mask,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        stop_tokens=stop_tokens,
        mesh=mesh,
        callback=callback,
        key=jax.random.fold_in(jax.random.key(options.seed), number),
    )
    texts = []
    for row in fetch_arrays(new):
        kept = [token for token in row.tolist() if token >= 0]
        if kept and kept[-1] in stop_tokens and kept[-1] not in tokenizer.special_tokens.values():
            kept = kept[:-1]  # a special token has no text, and may end a stop string
        texts.append(decode_until_stop(tokenizer.decode, kept, options.until, tokenizer.special_tokens))
    return texts
