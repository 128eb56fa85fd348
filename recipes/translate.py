"""Translate English into an invented language: an encoder reads the sentence, a decoder writes its translation.

    python recipes/translate.py                           # 400 steps, a minute on two cores
    python recipes/translate.py --data pairs.jsonl --seq-len 256 --embed 256  # records of a `source` and a `target`
    python recipes/translate.py --mixer mamba2            # in the decoder, in place of attention

The verb of the invented language is last, adjectives follow their noun, and endings mark number and object
(zoo/text/tasks/invented_language.py), so that a letter may depend on words far from its place. Of the sentences that
were held out, none is right before training, and over 90% are afterwards, letter by letter. The layers are LLaMA's with
cross-attention (Vaswani et al., arXiv:1706.03762).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import zoo
from zoo import layers, tools, train
from zoo.text.tasks.invented_language import list_translation_pairs
from zoo.text.tokenizers import ByteTokenizer

MIXERS = {"attention": None, "mamba2": layers.Mamba2, "gated-delta-net": layers.GatedDeltaNet}
START = (0,)  # the token that every target begins with


@dataclass(frozen=True)
class Config(train.RecordConfig):  # batch_size, steps, learning_rate, ..., mesh, data, records, seq_len, prompts
    """Train an encoder and a decoder on pairs of texts, translate held-out ones, export."""

    batch_size: int = 32
    steps: int = 400
    learning_rate: float = 3e-3
    seq_len: int = 56
    embed: int = 96  # Width of the residual stream.
    layers: int = 2  # Of the encoder, and of the decoder.
    heads: int = 4  # Heads of attention or of another mixer.
    mixer: Literal["attention", "mamba2", "gated-delta-net"] = "attention"  # Of the decoder.
    held_out: int = 256  # Sentences to translate, at most.
    eval_every: int = 100
    run: train.RunOptions = train.RunOptions(Path("runs/translate"))


def make_model(config, vocab, key):
    sizes = {"vocab": vocab, "embed": config.embed, "layers": config.layers, "heads": config.heads}
    options = {"mlp": 3 * config.embed, "mixer": MIXERS[config.mixer], "start": START}
    return config.mesh.apply(zoo.models.EncoderDecoderTransformer(**sizes, **options, key=key))


def main(config: Config) -> None:
    mesh = config.mesh.make_mesh()
    key = jax.random.key(config.run.seed)
    pairs = config.data or list_translation_pairs(20_000)
    options = {"seq_len": config.seq_len, "start": START, "kinds": ("pair",)}
    data = config.records.load(pairs, tokenizer=ByteTokenizer(), template=None, **options)
    batches = data.train.batches(config.batch_size, seed=config.run.seed, mesh=mesh)
    steps = config.steps if config.epochs is None else batches.count_steps(config.epochs)
    prompts = config.prompts or train.find_prompts(data, 8)
    test = next(iter(data.validation.ordered(config.held_out, limit=1)))

    model = zoo.init(partial(make_model, config, data.vocab), key, mesh)
    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = zoo.value(loss_fn, mesh)

    def measure(model):
        options = {"mask": test["source_mask"], "stop_tokens": data.stop_tokens, "mesh": mesh}
        new = zoo.generate(model, jnp.asarray(test["source"]), max_new_tokens=config.seq_len, **options)
        return {"validation": evaluate(model, test), "exact_match": (new == test["targets"]).all(axis=1).mean()}

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config, mesh=mesh, data=data, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        before = measure(model)
        for batch in run.steps(batches, steps):
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**measure(model))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)
    if run.stopped:
        return

    right = {name: f"{share['exact_match']:.1%}" for name, share in {"before": before, "after": measure(model)}.items()}
    tools.report_run(
        run,
        "Translation into an invented language",
        model,
        headline={"translated without a fault": f"{right['after']} ({right['before']} before)"},
        curves={"loss": "training", "validation": "held out"},
        samples=train.continue_prompts(model, data, prompts, mesh=mesh, key=key, temperature=0.0),
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
