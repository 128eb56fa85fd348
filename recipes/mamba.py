"""Train a small Mamba on the Python standard library: 300 steps, a minute and a half on two cores, 2.1 bits per byte.

    python recipes/mamba.py                               # Mamba-2, this machine's own library, byte by byte
    python recipes/mamba.py --generation 1                # the first Mamba: decays per channel

Unlike in recipes/transformer.py a layer is one mixer, and the size of its decoding state does not grow with the text.
"""

from pathlib import Path
from typing import Literal

import equinox as eqx
import jax

import zoo
from zoo import tools, train

import optax

PROMPTS = ["def main(", "class Node:\n    ", "import os\n"]
PRESETS = {"cpu": {}, "1b": {
    "vocab": 32768, "embed": 2048, "layers": 48, "state_dim": 128, "head_dim": 64, "seq_len": 4096, "batch_size": 64,
    "steps": 20_000, "learning_rate": 4e-4, "warmup_steps": 1000,
    "mesh_options": train.MeshOptions(remat="dots", dtype="bfloat16"),
}}  # fmt: skip


def main(
    *,
    generation: Literal[1, 2] = 2,
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 128,
    layers: int = 4,
    state_dim: int = 32,
    head_dim: int = 32,
    expand: int = 2,
    seq_len: int = 128,
    batch_size: int = 16,
    steps: int = 300,
    learning_rate: float = 4e-3,
    warmup_steps: int = 30,
    weight_decay: float = 0.1,
    eval_every: int = 100,
    mesh_options: train.MeshOptions = train.MeshOptions(),
    run_options: train.RunOptions = train.RunOptions(Path("runs/mamba")),
) -> None:
    """Train on text, evaluate, sample, export.

    Args:
        generation: Mamba or Mamba-2.
        data: Files and directories of text; by default this Python's standard library.
        vocab: 256 for bytes; more trains a byte-pair encoding on the text.
        embed: Width of the residual stream.
        layers: Number of blocks.
        state_dim: State size per channel, d_state.
        head_dim: Channels per head of Mamba-2, which share their decay.
        expand: Inner width of a mixer, as a multiple of embed.
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
    model_key, key = jax.random.split(jax.random.key(run_options.seed))
    preset, options = {1: (zoo.models.Mamba, {}), 2: (zoo.models.Mamba2, {"head_dim": head_dim})}[generation]
    sizes = {"vocab": corpus.vocab, "embed": embed, "layers": layers, "state_dim": state_dim, "expand": expand}
    model = zoo.init(lambda key: mesh_options.apply(preset(**sizes, **options, key=key)), model_key, mesh)
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = mesh_options.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw))
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, mesh_options.dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        scale = train.loss_scale(opt_state)
        loss, grads = zoo.value_and_grad(loss_fn, mesh, **mesh_options.accumulation)(model, batch, loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        metrics = {"bits_per_byte": train.bits_per_byte(loss, corpus.train), "gradient_norm": optax.tree.norm(grads)}
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, metrics

    evaluate = train.Evaluation(loss_fn, mesh, validation=corpus.validation.ordered(seq_len, batch_size, limit=16))
    with train.Run(run_options, config=config) as run:
        run.print_line(f"{zoo.count(model):,} parameters on {mesh}; {corpus}")
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, steps, tokens=batch_size * seq_len):
            model, opt_state, metrics = step(zoo.place_batch(batch, mesh, vocab=corpus.vocab), model, opt_state)
            run.log(**metrics, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1))
            if run.every(eval_every):
                run.log(**evaluate(model))
            if run.due(eval_every):
                run.save((model, opt_state), batches)
    tools.report_run(
        run,
        f"Mamba-{generation} from scratch",
        model,
        mesh,
        corpus,
        headline={"bytes of decoding state": f"{zoo.inspect.state_bytes(model, 1):,}"},
        prompts=PROMPTS,
        key=key,
        export_seq_len=seq_len,
        recipe=main,
    )


if __name__ == "__main__":
    train.run_cli(main, presets=PRESETS)
