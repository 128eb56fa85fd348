"""Measure what a trained state holds: how many tokens of a text a frozen model recalls that it has not in its context.

    python scripts/state_recall.py

Two toy models, of attention and a hybrid with a recurrence, learn to copy: they read 64 random tokens, and write them
again. Frozen, they then see one text of 64 tokens without its first copy. A state, virtual tokens or a LoRA is trained
on this text only, at the better of two learning rates. Recalled is a token that is the likeliest after the tokens
before it. It takes about ten minutes on two cores; `--steps` shortens the training.
"""

import argparse
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import zoo
from zoo import adapters
from zoo.layers import Attention, GatedDeltaNet
from zoo.ops.rotary import Rotary

VOCAB, LENGTH = 32, 64
SIZES = {"vocab": VOCAB, "embed": 64, "layers": 2, "mlp": 128, "key": jax.random.key(0)}
DELTA = partial(GatedDeltaNet, heads=2)
ATTENTION = partial(Attention, heads=4, rotary=Rotary(16))
RATES = 0.03, 0.1
TEXT = jax.random.randint(jax.random.key(7), (LENGTH,), 0, VOCAB)


def make_copies(key):
    text = jax.random.randint(key, (16, LENGTH), 0, VOCAB)
    twice = jnp.concatenate([text, text], axis=1)
    is_copy = jnp.arange(1, 2 * LENGTH) >= LENGTH
    return {"tokens": twice[:, :-1], "targets": jnp.where(is_copy, twice[:, 1:], -1)}


def put_before(ids):
    """Return the batch of the text, with tokens before it that are not predicted."""
    return {
        "tokens": jnp.concatenate([ids, TEXT[:-1]])[None],
        "targets": jnp.concatenate([jnp.full(len(ids), -1), TEXT[1:]])[None],
    }


def train(model, make_batch, steps, learning_rate):
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_onecycle_schedule(steps, learning_rate))
    )

    def mean_loss(trainable, model, batch):
        total, count = zoo.cross_entropy(eqx.combine(trainable, model), batch)
        return total / count

    @eqx.filter_jit
    def step(model, state, key):
        gradients = jax.grad(mean_loss)(zoo.trainable(model), model, make_batch(key))
        updates, state = optimizer.update(gradients, state, zoo.trainable(model))
        return eqx.apply_updates(model, updates), state

    state = optimizer.init(zoo.trainable(model))
    for key in jax.random.split(jax.random.key(1), steps):
        model, state = step(model, state, key)
    return model


@eqx.filter_jit
def count_recalled(model, batch):
    is_right = model(batch["tokens"]).argmax(-1) == batch["targets"]
    return is_right.sum()


def main(steps=400, adapter_steps=300):
    key = jax.random.key(2)
    nothing = TEXT[:0]
    models = {
        "attention": eqx.filter_jit(zoo.models.Transformer)(heads=4, **SIZES),
        "hybrid": eqx.filter_jit(partial(zoo.models.Hybrid, pattern=[DELTA, ATTENTION]))(**SIZES),
    }
    print("| model | what is trained | numbers | tokens of 63 |\n|---|---|--:|--:|")
    for name, model in models.items():
        base = train(model, make_copies, steps, 4e-3)
        print(f"| {name} | nothing | 0 | {count_recalled(base, put_before(nothing))} |")
        print(
            f"| {name} | nothing, with the text in the prompt | 0 | {count_recalled(base, put_before(TEXT))} |",
            flush=True,
        )
        tries = [
            (f"LoRA, rank {rank}", adapters.lora(base, targets="all-linear", rank=rank, key=key), nothing)
            for rank in (1, 4)
        ]
        for length in (1, 4, 16):
            tries.append((f"state, {length} tokens", adapters.state(base, length, key=key), nothing))
        for length in (4, 16):
            virtual = VOCAB + jnp.arange(length)
            tries.append((f"prompt, {length} tokens", adapters.prompt(base, length, key=key), virtual))
        for words, adapted, ids in tries:
            batch = put_before(ids)
            trained = [train(adapted, lambda _, batch=batch: batch, adapter_steps, rate) for rate in RATES]
            recalled = max(int(count_recalled(model, batch)) for model in trained)
            print(f"| {name} | {words} | {zoo.count(adapted):,} | {recalled} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps of the models that copy")
    parser.add_argument("--adapter-steps", type=int, default=300, help="steps of each state, prompt and LoRA")
    main(**vars(parser.parse_args()))
