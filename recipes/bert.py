"""Train a masked language model on the Python standard library: 300 steps, a minute on two cores, 53% of bytes right.

    python recipes/bert.py                                # this machine's own library, byte by byte
    python recipes/bert.py --data ~/books --vocab 4096 --fsdp 2 --tensor 2 --out runs/bert-books

The objective is BERT's (arXiv:1810.04805), the layers are ModernBERT's (arXiv:2412.13663). A run's directory holds
metrics, checkpoints, report.html with held-out text filled in, and export/, a Hugging Face directory.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.experimental import multihost_utils

import zoo
from zoo import tools, train

SPECIAL_TOKENS = ("cls_token_id", "sep_token_id", "pad_token_id", "mask_token_id")


@dataclass(frozen=True)
class Config(train.ModelConfig):  # batch_size, steps, learning_rate, ..., mesh, data, seq_len, vocab, embed, ...
    """Train on masked text, evaluate, fill in held-out text, export."""

    embed: int = 128
    layers: int = 4
    heads: int = 4
    held_out: int = 64  # Sequences to evaluate on; a multiple of the devices that share the batch.
    run: train.RunOptions = train.RunOptions(Path("runs/bert"))


def mask_tokens(tokens, key, mask_token, vocab):
    """Choose 15% of the tokens as targets; replace 80% of them by the mask and 10% by random tokens, keep 10%."""
    target_key, change_key, token_key = jax.random.split(key, 3)
    is_target = jax.random.bernoulli(target_key, 0.15, tokens.shape) & (tokens != mask_token)
    change = jax.random.uniform(change_key, tokens.shape)
    other = jax.random.randint(token_key, tokens.shape, 0, vocab)
    changed = jnp.where(change < 0.8, mask_token, jnp.where(change < 0.9, other, tokens))
    return {"tokens": jnp.where(is_target, changed, tokens), "targets": jnp.where(is_target, tokens, -1)}


def make_model(config, vocab, key):
    sizes = {"vocab": vocab, "embed": config.embed, "layers": config.layers, "heads": config.heads}
    return config.mesh.apply(zoo.models.ModernBERT(**sizes, mlp=config.mlp_dim, key=key))


def main(config: Config) -> None:
    mesh = config.mesh.make_mesh()
    model_key, mask_key, test_key = jax.random.split(jax.random.key(config.run.seed), 3)

    corpus = train.load_text(config.data, vocab=config.vocab)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)
    mask_token = corpus.tokenizer.separator  # which begins documents, and is in none
    mask = jax.jit(partial(mask_tokens, mask_token=mask_token, vocab=corpus.vocab))
    (rows,) = corpus.validation.ordered(config.seq_len, config.held_out, limit=1, process=zoo.parallel.reader(mesh))
    test = mask(zoo.place_batch(rows, mesh, vocab=corpus.vocab)["tokens"], test_key)

    model = zoo.init(partial(make_model, config, corpus.vocab), model_key, mesh)
    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    @partial(zoo.spmd, mesh=mesh, out="batch seq vocab")
    def predict(model, tokens):
        return zoo.cast(model, config.mesh.dtype)(tokens)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = zoo.value(loss_fn, mesh)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        tokens, key = inputs
        loss, grads = gradient(model, mask(tokens, key))
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config, mesh=mesh, data=corpus, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps):
            key = jax.random.fold_in(mask_key, run.step)
            model, opt_state, metrics = step((batch["tokens"], key), model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(validation=evaluate(model, test))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)
    if run.stopped:
        return

    guessed = {**test, "guesses": predict(model, test["tokens"]).argmax(-1)}
    samples, right = fill_in(corpus, **multihost_utils.process_allgather(guessed, tiled=True))
    tools.report_run(
        run,
        "A masked language model from scratch",
        model,
        headline={"masked tokens right": f"{right:.1%}"},
        curves={"loss": "training", "validation": "held out"},
        unit="nats per masked token",
        samples=samples,
    )
    run.export(model, seq_len=config.seq_len, **dict.fromkeys(SPECIAL_TOKENS, mask_token))


def fill_in(corpus, tokens, targets, guesses):
    """Return six rows as they were masked and as they are filled in, and the share of targets that are right."""
    hidden = targets >= 0
    filled = jnp.where(hidden, guesses, tokens)
    samples = []
    for row in range(min(len(tokens), 6)):
        letters = ["█" if hidden[row, i] else corpus.decode(tokens[row, i : i + 1]) for i in range(tokens.shape[1])]
        samples.append(("".join(letters), "\n\n" + corpus.decode(filled[row])))
    return samples, (guesses == targets)[hidden].mean()


if __name__ == "__main__":
    train.run_cli(main, Config)
