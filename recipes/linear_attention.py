"""Compare recurrent mixers with attention at equal parameters: 2.41 bits per byte with Mamba-2, 2.69 with attention.

    python recipes/linear_attention.py                    # five models in sequence, on two cores
    python recipes/linear_attention.py --resume           # after Ctrl-C; on another mesh too
    python recipes/linear_attention.py --mixers attention rwkv7 --embed 512 --layers 12 --seq-len 2048 --fsdp 8

Models differ only in the mixer and see the same batches; SwiGLU widths equalize parameters: docs/recurrences.md.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import optax

import zoo
from zoo import layers as zl
from zoo import tools, train


@dataclass(frozen=True)
class Config(train.ModelConfig):  # batch_size, steps, learning_rate, ..., mesh, data, seq_len, vocab, embed, ...
    """Train a model of each mixer, compare."""

    # Names of mixers.
    mixers: tuple[str, ...] = ("attention", "retention", "gla", "gated-delta-net", "mamba2")
    mlp_dim: int = 256  # Width of the gated MLP after attention; the widths after other mixers equalize the parameters.
    steps: int = 200
    learning_rate: float = 6e-3
    eval_every: int = 50
    run: train.RunOptions = train.RunOptions(Path("runs/linear_attention"))


def mixer_factories(embed, heads):
    """Mixers by name, called with `embed` and `key`; options are those of the papers."""
    size = embed // heads
    norm = partial(zl.RMSNorm, size, features=zoo.parallel.Dim("head_dim"))
    return {
        "attention": partial(zl.Attention, heads=heads, rotary=zoo.ops.rotary.Rotary(size), qk_norm=norm),
        "linear-attention": partial(zl.LinearAttention, heads=heads),
        "retention": partial(zl.Retention, heads=heads),
        "gla": partial(zl.GatedLinearAttention, heads=heads),
        "hgrn2": partial(zl.HGRN2, heads=heads),
        "mlstm": partial(zl.MLSTM, heads=heads),
        "delta-net": partial(zl.DeltaNet, heads=heads),
        "gated-delta-net": partial(zl.GatedDeltaNet, heads=heads),
        "kimi-delta-attention": partial(zl.KimiDeltaAttention, heads=heads),
        "gated-delta-product": partial(zl.GatedDeltaProduct, heads=heads),
        "rwkv6": partial(zl.RWKV6, heads=heads),
        "rwkv7": partial(zl.RWKV7, heads=heads),
        "rg-lru": partial(zl.RGLRU, heads=heads),
        "mamba2": partial(zl.Mamba2, head_dim=size, state_dim=size),  # 2 * heads: expand is 2
    }


def make_model(config, vocab, mixer, mlp_dim, key):
    pattern = [mixer_factories(config.embed, config.heads)[mixer]]
    sizes = {"vocab": vocab, "embed": config.embed, "layers": config.layers, "mlp": mlp_dim}
    return config.mesh.apply(zoo.models.Hybrid(**sizes, pattern=pattern, key=key))


def equalize_widths(config, vocab):
    """Return the width of the MLP after each mixer that gives all models the parameters of the one with attention."""

    def count(mixer, mlp_dim):
        return zoo.count(eqx.filter_eval_shape(make_model, config, vocab, mixer, mlp_dim, jax.random.key(0)))

    unit = 8 * config.mesh.tensor
    target = count("attention", config.mlp_dim)
    widths = {}
    for name in config.mixers:
        spare = target - count(name, unit)
        width = unit + round(spare / (3 * config.embed * config.layers * unit)) * unit
        if width < unit:
            raise ValueError(
                f"{name} has more parameters without an MLP than attention with one: raise mlp={config.mlp_dim}"
            )
        widths[name] = width
    return widths


def main(config: Config) -> None:
    train.check_names("mixers", config.mixers, mixer_factories(config.embed, config.heads))
    mesh = config.mesh.make_mesh()
    key = jax.random.key(config.run.seed)

    corpus = train.load_text(config.data, vocab=config.vocab)
    validation = corpus.validation.ordered(config.seq_len, config.batch_size, limit=8)
    makers = {}
    for name, width in equalize_widths(config, corpus.vocab).items():
        makers[name] = partial(make_model, config, corpus.vocab, name, width)
        mesh.specs(eqx.filter_eval_shape(makers[name], key))  # sizes that do not fit raise now

    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = train.Evaluation(loss_fn, mesh, validation=validation)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    rows = []
    for name, make in makers.items():
        model = zoo.init(make, key, mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)

        with train.Run(config, name=name, mesh=mesh, data=corpus, model=model) as run:
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, config.steps):
                model, opt_state, metrics = step(batch, model, opt_state)
                run.log(**metrics, learning_rate=schedule(run.step - 1))
                if run.every(config.eval_every):
                    run.log(**evaluate(model))
                if run.due(config.eval_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return

        last = train.summary(run.directory)
        row = {
            "run": name,
            "parameters": zoo.count(model),
            "bits per byte": last["validation"],
            "tokens/s": round(last["tokens_per_second"]),
        }
        for length in (config.seq_len, 64 * config.seq_len):
            row[f"bytes of state after {length:,} tokens"] = zoo.inspect.state_bytes(model, length)
        rows.append(row)

    tools.report_runs(
        config,
        "Recurrent mixers and attention",
        rows,
        description=f"{config.steps} steps on {mesh}",
        tokens_per_step=config.batch_size * config.seq_len,
        parameters=tools.report.tabulate_parameters(model, mesh),
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
