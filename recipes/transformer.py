"""Train a small Transformer on the Python standard library: 300 steps, a minute on two cores, 2.3 bits per byte.

    python recipes/transformer.py                         # this machine's own library, byte by byte
    python recipes/transformer.py --resume                # after Ctrl-C; on another mesh too
    python recipes/transformer.py --data ~/books --vocab 4096 --out runs/books
    python recipes/transformer.py 1b --fsdp 8 --data /data/text

A run's directory holds its configuration, metrics, checkpoints, report.html and export/, the model and its tokenizer as
a Hugging Face directory: recipes/finetune.py goes on from it.
"""

from pathlib import Path

import equinox as eqx
import jax

import zoo
from zoo import tools, train

import optax

TITLE = "A Transformer from scratch"
PROMPTS = ["def main(", "class Node:\n    ", "import os\n"]
PRESETS = {"cpu": {}, "1b": {
    "vocab": 32768, "embed": 2048, "layers": 20, "heads": 16, "mlp_dim": 5632, "seq_len": 4096, "batch_size": 64,
    "steps": 20_000, "learning_rate": 4e-4, "warmup_steps": 1000,
    "mesh_options": train.MeshOptions(remat="dots", dtype="bfloat16"),
}}  # fmt: skip


def main(
    *,
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 128,
    layers: int = 4,
    heads: int = 2,
    kv_heads: int | None = None,
    mlp_dim: int = 384,
    dropout: float = 0.0,
    seq_len: int = 128,
    batch_size: int = 16,
    steps: int = 300,
    learning_rate: float = 3e-3,
    warmup_steps: int = 30,
    weight_decay: float = 0.1,
    eval_every: int = 100,
    mesh_options: train.MeshOptions = train.MeshOptions(),
    run_options: train.RunOptions = train.RunOptions(Path("runs/transformer")),
) -> None:
    """Train on text, evaluate, sample, export.

    Args:
        data: Files and directories of text; by default this Python's standard library.
        vocab: 256 for bytes; more trains a byte-pair encoding on the text.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads, embed / heads wide each.
        kv_heads: Heads of keys and values, for grouped-query attention; by default as many as heads.
        mlp_dim: Width of the gated MLP.
        dropout: Dropout rate after embedding, attention and MLP.
        seq_len: Tokens per sequence.
        batch_size: Sequences per step, over all devices.
        steps: Optimizer steps.
        learning_rate: Peak learning rate, after linear warmup; cosine decay to a tenth.
        warmup_steps: Steps of linear warmup, at most half of all.
        weight_decay: AdamW's, of matrices and embeddings.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, mesh, warmup_steps = dict(locals()), mesh_options.make_mesh(), min(warmup_steps, steps // 2)
    corpus = train.load_text(data, vocab=vocab)
    batches = corpus.train.batches(seq_len, batch_size, seed=run_options.seed, process=zoo.parallel.reader(mesh))
    model_key, dropout_key, sample_key = jax.random.split(jax.random.key(run_options.seed), 3)
    options = {"vocab": corpus.vocab, "embed": embed, "layers": layers, "heads": heads, "kv_heads": kv_heads}
    options |= {"mlp": mlp_dim, "qk_norm": True, "dropout": dropout}
    model = zoo.init(lambda key: mesh_options.apply(zoo.models.Transformer(**options, key=key)), model_key, mesh)

    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = mesh_options.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw))
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch, key=None):
        return zoo.cross_entropy(zoo.cast(model, mesh_options.dtype), batch, key=key)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        batch, key = inputs
        gradient, scale = zoo.value_and_grad(loss_fn, mesh, **mesh_options.accumulation), train.loss_scale(opt_state)
        loss, grads = gradient(model, batch, key=key, loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        metrics = {"bits_per_byte": train.bits_per_byte(loss, corpus.train), "gradient_norm": optax.tree.norm(grads)}
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, metrics

    evaluate = train.Evaluation(loss_fn, mesh, validation=corpus.validation.ordered(seq_len, batch_size, limit=16))
    tokens = batch_size * seq_len
    flops = 6 * tokens * (zoo.count(model) + layers * embed * seq_len)  # a multiply-add forward, two backward; causal
    with train.Run(run_options, config=config) as run:
        run.print_line(f"{zoo.count(model):,} parameters on {mesh}; {corpus}")
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, steps, tokens=tokens, flops=flops):
            inputs = zoo.place_batch(batch, mesh, vocab=corpus.vocab), jax.random.fold_in(dropout_key, run.step)
            model, opt_state, metrics = step(inputs, model, opt_state)
            run.log(**metrics, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1))
            if run.every(eval_every):
                run.log(**evaluate(model))
            if run.due(eval_every):
                run.save((model, opt_state), batches)
    about = {"prompts": PROMPTS, "key": sample_key, "export_seq_len": seq_len, "recipe": main}
    tools.report_run(run, TITLE, model, mesh, corpus, **about)


if __name__ == "__main__":
    train.run_cli(main, presets=PRESETS)
