"""Train a small Transformer on the Python standard library: 300 steps, a minute on two cores, 2.3 bits per byte.

    python recipes/transformer.py                         # this machine's own library, byte by byte
    python recipes/transformer.py --resume                # after Ctrl-C; on another mesh too
    python recipes/transformer.py --data ~/books --vocab 4096 --out runs/books
    python recipes/transformer.py 1b --fsdp 8 --data /data/text
    python recipes/transformer.py --optimizer muon        # or lion, schedule_free, ademamix, adopt, prodigy
    python recipes/transformer.py --layers 2 --loops 2    # two layers that run twice; --streams 4: hyper-connections
    python recipes/transformer.py --decay-steps 0         # a stable run; --resume 200 --decay-steps 40 branches off

A run's directory holds its configuration, metrics, checkpoints, report.html and export/, the model and its tokenizer as
a Hugging Face directory: recipes/finetune.py goes on from it.
"""

from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import optax

import zoo
from zoo import tools, train

TITLE = "A Transformer from scratch"
PROMPTS = ["def main(", "class Node:\n    ", "import os\n"]


@dataclass(frozen=True)
class Config:
    """Train on text, evaluate, sample, export."""

    data: tuple[Path, ...] = ()  # Files and directories of text; by default this Python's standard library.
    vocab: int = 256  # 256 for bytes; more trains a byte-pair encoding on the text.
    embed: int = 128  # Width of the residual stream.
    layers: int = 4  # Number of blocks.
    loops: int = 1  # Times that all blocks run, one after the other, with the same parameters.
    streams: int = 1  # Residual streams; with several, hyper-connections (mHC).
    heads: int = 2  # Attention heads, embed / heads wide each.
    kv_heads: int | None = None  # Heads of keys and values, for grouped-query attention; by default as many as heads.
    mlp_dim: int = 384  # Width of the gated MLP.
    dropout: float = 0.0  # Dropout rate after embedding, attention and MLP.
    seq_len: int = 128  # Tokens per sequence.
    batch_size: int = 16  # Sequences per step, over all devices.
    steps: int = 300  # Optimizer steps.
    optimizer: train.OptimizerName = "adamw"  # Optimizer; schedule_free is evaluated and exported at its average.
    learning_rate: float = 3e-3  # Peak learning rate, after linear warmup; a tenth for lion, 1 for prodigy.
    warmup_steps: int = 30  # Steps of linear warmup, at most half of all.
    decay_steps: int | None = None  # Last steps, decayed to 0 as 1 - sqrt; 0 for none. By default a cosine to a tenth.
    weight_decay: float = 0.1  # Of matrices and embeddings.
    eval_every: int = 100  # Steps between evaluations, each with a checkpoint.
    mesh: train.MeshOptions = train.MeshOptions()
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
    reader = zoo.parallel.reader(mesh)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, process=reader)
    validation = corpus.validation.ordered(config.seq_len, config.batch_size, limit=16)

    def make_model(key):
        model = zoo.models.Transformer(
            vocab=corpus.vocab,
            embed=config.embed,
            layers=config.layers,
            order=config.loops * [*range(config.layers)],
            streams=config.streams,
            heads=config.heads,
            kv_heads=config.kv_heads,
            mlp=config.mlp_dim,
            qk_norm=True,
            dropout=config.dropout,
            key=key,
        )
        return config.mesh.apply(model)

    model = zoo.init(make_model, model_key, mesh)

    peak = config.learning_rate
    warmup = min(config.warmup_steps, config.steps // 2)
    if config.decay_steps is None and config.optimizer != "schedule_free":  # which averages instead
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, peak / 10)
    else:
        schedule = train.warmup_stable_decay(peak, warmup, config.steps, config.decay_steps or 0)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    named = train.make_optimizer(config.optimizer, schedule, weight_decay=config.weight_decay, mesh=mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), named)
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

    tokens = config.batch_size * config.seq_len
    scores = config.loops * config.layers * config.embed * config.seq_len
    multiplied = zoo.count(model) + (config.loops - 1) * zoo.count(model.stack)
    flops = 6 * tokens * (multiplied + scores)  # forward 2, backward 4
    with train.Run(config.run, config=config) as run:
        run.print_line(f"{zoo.count(model):,} parameters on {mesh}; {corpus}")
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps, tokens=tokens, flops=flops):
            batch = zoo.place_batch(batch, mesh, vocab=corpus.vocab)
            key = jax.random.fold_in(dropout_key, run.step)
            model, opt_state, metrics = step((batch, key), model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(train.eval_params(opt_state, model)))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)

    tools.report_run(
        run,
        TITLE,
        train.eval_params(opt_state, model),
        mesh,
        corpus,
        config=config,
        prompts=PROMPTS,
        key=sample_key,
        export_seq_len=config.seq_len,
    )


if __name__ == "__main__":
    train.run_cli(main, Config, PRESETS)
