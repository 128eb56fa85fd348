"""Train a small Mamba on the Python standard library: 300 steps, a minute and a half on two cores, 2.1 bits per byte.

    python recipes/mamba.py                               # Mamba-2, this machine's own library, byte by byte
    python recipes/mamba.py --generation 1                # the first Mamba: decays per channel

Unlike in recipes/transformer.py a layer is one mixer, and the size of its decoding state does not grow with the text.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import optax

import zoo
from zoo import tools, train

PROMPTS = ["def main(", "class Node:\n    ", "import os\n"]


@dataclass(frozen=True)
class Config:
    """Train on text, evaluate, sample, export."""

    generation: Literal[1, 2] = 2  # Mamba or Mamba-2.
    data: tuple[Path, ...] = ()  # Files and directories of text; by default this Python's standard library.
    vocab: int = 256  # 256 for bytes; more trains a byte-pair encoding on the text.
    embed: int = 128  # Width of the residual stream.
    layers: int = 4  # Number of blocks.
    state_dim: int = 32  # State size per channel, d_state.
    head_dim: int = 32  # Channels per head of Mamba-2, which share their decay.
    expand: int = 2  # Inner width of a mixer, as a multiple of embed.
    seq_len: int = 128  # Tokens per sequence.
    batch_size: int = 16  # Sequences per step, over all devices.
    steps: int = 300  # Optimizer steps.
    learning_rate: float = 4e-3  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 30  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.1  # AdamW's, of matrices and embeddings.
    eval_every: int = 100  # Steps between evaluations, each with a checkpoint.
    mesh: train.MeshOptions = train.MeshOptions()
    run: train.RunOptions = train.RunOptions(Path("runs/mamba"))


PRESETS = {
    "cpu": Config(),
    "1b": Config(
        vocab=32768,
        embed=2048,
        layers=48,
        state_dim=128,
        head_dim=64,
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
    model_key, sample_key = jax.random.split(jax.random.key(config.run.seed))

    corpus = train.load_text(config.data, vocab=config.vocab)
    reader = zoo.parallel.reader(mesh)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, process=reader)
    validation = corpus.validation.ordered(config.seq_len, config.batch_size, limit=16)

    def make_model(key):
        if config.generation == 1:
            make_mamba = zoo.models.Mamba
        else:
            make_mamba = partial(zoo.models.Mamba2, head_dim=config.head_dim)
        model = make_mamba(
            vocab=corpus.vocab,
            embed=config.embed,
            layers=config.layers,
            state_dim=config.state_dim,
            expand=config.expand,
            key=key,
        )
        return config.mesh.apply(model)

    model = zoo.init(make_model, model_key, mesh)

    peak = config.learning_rate
    warmup = min(config.warmup_steps, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = train.Evaluation(loss_fn, mesh, validation=validation)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        metrics = {"bits_per_byte": train.bits_per_byte(loss, corpus.train), "gradient_norm": optax.tree.norm(grads)}
        return model, opt_state, metrics

    with train.Run(config.run, config=config) as run:
        run.print_line(f"{zoo.count(model):,} parameters on {mesh}; {corpus}")
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps, tokens=config.batch_size * config.seq_len):
            batch = zoo.place_batch(batch, mesh, vocab=corpus.vocab)
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)

    tools.report_run(
        run,
        f"Mamba-{config.generation} from scratch",
        model,
        mesh,
        corpus,
        config=config,
        headline={"bytes of decoding state": f"{zoo.inspect.state_bytes(model, 1):,}"},
        prompts=PROMPTS,
        key=sample_key,
        export_seq_len=config.seq_len,
    )


if __name__ == "__main__":
    train.run_cli(main, Config, PRESETS)
