"""Train a small Mamba on the Python standard library: 300 steps, a minute and a half on two cores, 2.1 bits per byte.

    python recipes/mamba.py                               # Mamba-2, this machine's own library, byte by byte
    python recipes/mamba.py 1b --fsdp 8 --data /data/text

Unlike in recipes/transformer.py a layer is one mixer, and the size of its decoding state does not grow with the text.
Replace `zoo.models.Mamba2` by `zoo.models.Mamba`, without `head_dim`: the first Mamba, with decays per channel.
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
    state_dim: int = 32  # State size per channel, d_state.
    head_dim: int = 32  # Channels per head, which share their decay.
    expand: int = 2  # Inner width of a mixer, as a multiple of embed.
    learning_rate: float = 4e-3
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
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)
    validation = corpus.validation.ordered(config.seq_len, config.batch_size, limit=16)

    def make_model(key):
        model = zoo.models.Mamba2(
            vocab=corpus.vocab,
            embed=config.embed,
            layers=config.layers,
            state_dim=config.state_dim,
            head_dim=config.head_dim,
            expand=config.expand,
            key=key,
        )
        return config.mesh.apply(model)

    model = zoo.init(make_model, model_key, mesh)

    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
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

    with train.Run(config, mesh=mesh, data=corpus, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps):
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)

    tools.report_run(
        run,
        "Mamba-2 from scratch",
        model,
        headline={"bytes of decoding state": f"{zoo.inspect.state_bytes(model, 1):,}"},
        prompts=PROMPTS,
        key=sample_key,
        export_seq_len=config.seq_len,
    )


if __name__ == "__main__":
    train.run_cli(main, Config, PRESETS)
