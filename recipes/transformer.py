"""Train a small Transformer on the Python standard library: 300 steps, a minute on two cores, 2.3 bits per byte.

    python recipes/transformer.py                         # this machine's own library, byte by byte
    python recipes/transformer.py --resume                # after Ctrl-C; on another mesh too
    python recipes/transformer.py --data ~/books --vocab 4096 --out runs/books
    python recipes/transformer.py 1b --fsdp 8 --data /data/text

A run's directory holds its configuration, metrics, checkpoints, report.html and export/, the model and its tokenizer as
a Hugging Face directory: recipes/finetune.py goes on from it. Other optimizers: docs/optimizers.md. Layers that run
several times, and several residual streams: docs/residuals.md.
"""

from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import optax

import zoo
from zoo import tools, train

PROMPTS = ["def main(", "class Node:\n    ", "import os\n"]


@dataclass(frozen=True)
class Config(train.TextConfig):  # batch_size, steps, learning_rate, ..., mesh, data, seq_len
    """Train on text, evaluate, sample, export."""

    vocab: int = 256  # 256 for bytes; more trains a byte-pair encoding on the text.
    embed: int = 128  # Width of the residual stream.
    layers: int = 4  # Number of blocks.
    heads: int = 2  # Attention heads, embed / heads wide each.
    kv_heads: int | None = None  # Heads of keys and values, for grouped-query attention; by default as many as heads.
    mlp_dim: int = 384  # Width of the gated MLP.
    dropout: float = 0.0  # Dropout rate after embedding, attention and MLP.
    run: train.RunOptions = train.RunOptions(Path("runs/transformer"))


PRESETS = {
    "cpu": Config(),
    "1b": Config(
        vocab=32768,
        embed=2048,
        layers=20,
        heads=16,
        mlp_dim=5632,
        seq_len=4096,
        batch_size=64,
        steps=20_000,
        learning_rate=4e-4,
        warmup_steps=1000,
        mesh=train.MeshOptions(remat="dots", dtype="bfloat16"),
    ),
}


def main(config: Config) -> None:
    mesh = config.mesh.make_mesh()
    model_key, dropout_key, sample_key = jax.random.split(jax.random.key(config.run.seed), 3)

    corpus = train.load_text(config.data, vocab=config.vocab)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)
    validation = corpus.validation.ordered(config.seq_len, config.batch_size, limit=16)

    def make_model(key):
        model = zoo.models.Transformer(
            vocab=corpus.vocab,
            embed=config.embed,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            mlp=config.mlp_dim,
            qk_norm=True,
            dropout=config.dropout,
            key=key,
        )
        return config.mesh.apply(model)

    model = zoo.init(make_model, model_key, mesh)

    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch, key=None):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch, key=key)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = train.Evaluation(loss_fn, mesh, validation=validation)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        batch, key = inputs
        loss, grads = gradient(model, batch, key=key)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        metrics = {"bits_per_byte": train.bits_per_byte(loss, corpus.train), "gradient_norm": optax.tree.norm(grads)}
        return model, opt_state, metrics

    with train.Run(config, mesh=mesh, data=corpus, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps):
            key = jax.random.fold_in(dropout_key, run.step)
            model, opt_state, metrics = step((batch, key), model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)

    title = "A Transformer from scratch"
    tools.report_run(run, title, model, prompts=PROMPTS, key=sample_key, export_seq_len=config.seq_len)


if __name__ == "__main__":
    train.run_cli(main, Config, PRESETS)
