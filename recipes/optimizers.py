"""Compare optimizers at equal tokens and their best learning rates: Muon is 0.14 bits per byte below AdamW, Lion above.

    python recipes/optimizers.py                          # five optimizers, thirteen minutes on two shared cores
    python recipes/optimizers.py --optimizers adamw muon --rates 4e-3 8e-3 16e-3 --num-seeds 4 --out runs/muon
    python recipes/optimizers.py --resume                 # after Ctrl-C: complete runs are kept

A small Transformer reads bytes of the Python standard library. All optimizers share initial parameters, batches, linear
warmup, clipping, the coefficient of weight decay and the grid of learning rates; the table adds bytes of state and time
per step. All rates and seeds of an optimizer are one program. docs/compare_optimizers.md has the results.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zoo
from zoo import tools, train

OPTIMIZERS = get_args(train.OptimizerName)


@dataclass(frozen=True)
class Config:
    """Train with each optimizer, all learning rates and seeds at once; compare."""

    data: tuple[Path, ...] = ()  # Files and directories of text; by default this Python's standard library.
    # Names of optimizers; the first one's step is the unit of time. Learning rates of prodigy are near 1.
    optimizers: tuple[train.OptimizerName, ...] = ("adamw", "muon", "lion", "schedule_free", "ademamix")
    # Peak learning rates, the same for all optimizers: powers of two.
    rates: tuple[float, ...] = tuple(2.0**power for power in range(-10, -2))
    num_seeds: int = 2  # Initializations per learning rate, whose mean counts.
    embed: int = 64  # Width of the residual stream.
    layers: int = 2  # Number of blocks.
    heads: int = 2  # Attention heads, embed / heads wide each.
    mlp_dim: int = 192  # Width of the gated MLP.
    seq_len: int = 64  # Bytes per row.
    batch_size: int = 16  # Rows per step.
    steps: int = 300  # Optimizer steps of each run.
    # Steps of linear warmup, at most half of all. Then a cosine to zero, for schedule_free a constant.
    warmup_steps: int = 30
    weight_decay: float = 0.1  # Of matrices and embeddings, times the learning rate.
    eval_rows: int = 256  # Held-out rows, spread evenly over the text.
    eval_every: int = 150  # Steps between evaluations, each with a checkpoint.
    timed_steps: int = 50  # Steps of one model with each optimizer, in turn, for the time per step.
    run: train.RunOptions = train.RunOptions(Path("runs/optimizers"))


def make_model(config, key):
    sizes = {"vocab": 256, "embed": config.embed, "layers": config.layers, "heads": config.heads}
    return zoo.models.Transformer(**sizes, mlp=config.mlp_dim, qk_norm=True, key=key)


def make_schedule(config, name):
    """Return a schedule that peaks at 1: warmup, and then a cosine to zero, for schedule_free a constant."""
    if name != "schedule_free":
        return train.warmup_cosine(1.0, config.warmup_steps, config.steps, end=0.0)
    warmup = min(config.warmup_steps, config.steps // 2)
    return jax.jit(train.warmup_stable_decay(1.0, warmup, config.steps, decay_steps=0))


def make_optimizer(config, name, peak):
    """Build an optimizer in the program that uses it: the peak learning rate is traced, one of a sweep's."""
    schedule = make_schedule(config, name)
    named = train.make_optimizer(name, lambda step: peak * schedule(step), weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), named)


def start(config, name, keys):
    """Return a model for each key, stacked, and the states of the optimizer."""
    models = train.sweep_models(partial(make_model, config), keys)
    initialize = train.sweep_map(lambda model: make_optimizer(config, name, 1.0).init(zoo.trainable(model)))
    return models, initialize(models)


def loss_fn(params, model, batch):
    total, count = zoo.cross_entropy(eqx.combine(params, model), batch)
    return total / count


def step_run(config, name, batch, model, opt_state, peak):
    params = zoo.trainable(model)
    loss, grads = jax.value_and_grad(loss_fn)(params, model, batch)
    updates, opt_state = make_optimizer(config, name, peak).update(grads, opt_state, params)
    model = eqx.apply_updates(model, updates)
    return model, opt_state, {"losses": loss, "gradient_norm": optax.tree.norm(grads)}


def main(config: Config) -> None:
    train.check_names("optimizers", config.optimizers, OPTIMIZERS)
    seed = config.run.seed
    peaks, keys = train.sweep_grid(config.rates, seeds=range(seed, seed + config.num_seeds))
    corpus = train.load_text(config.data)
    (held_out,) = corpus.validation.ordered(config.seq_len, config.eval_rows, limit=1)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, models, opt_states):
        """Step all runs, which are stacked: every array of their models has a leading dim."""
        name, batch, peaks = inputs
        stacked = eqx.if_array(0)
        step_runs = eqx.filter_vmap(partial(step_run, config, name), in_axes=(None, stacked, stacked, 0))
        return step_runs(batch, models, opt_states, peaks)

    @train.sweep_map
    def evaluate(run, batch):
        model, opt_state = run
        model = train.eval_params(opt_state, model)  # schedule_free's average
        loss = loss_fn(zoo.trainable(model), model, batch)
        return train.bits_per_byte(loss, corpus.validation)

    rows = []
    curves = []
    for name in config.optimizers:
        batches = corpus.train.batches(config.seq_len, config.batch_size, seed=seed)
        schedule = make_schedule(config, name)
        with train.Run(config, name=name, data=corpus) as run:
            run.print_line(f"{name}: {len(config.rates)} learning rates, {config.num_seeds} seeds; {corpus}")
            models, opt_states = run.restore(start(config, name, keys), batches)
            for batch in run.steps(batches, config.steps, tokens=config.batch_size * config.seq_len * len(keys)):
                models, opt_states, metrics = step((name, batch, peaks), models, opt_states)
                run.log(**metrics, learning_rate=peaks * schedule(run.step - 1))
                if run.every(config.eval_every):
                    losses = evaluate((models, opt_states), held_out).reshape(len(config.rates), config.num_seeds)
                    run.log(held_out=losses, validation=jnp.nanmin(losses.mean(1)))
                if run.due(config.eval_every):
                    run.save((models, opt_states), batches)
        batches.close()
        if run.stopped:
            return
        losses = np.array(train.summary(run.directory)["held_out"], float)
        model = eqx.filter_eval_shape(make_model, config, keys[0])
        size = sum(x.nbytes for x in jax.tree.leaves(opt_states)) / len(keys) / zoo.count(model)
        rows.append(tabulate(config, name, losses, size))
        curves.append(tools.report.Curve(name, config.rates, losses.mean(1)))

    seconds = time_steps(config, step, {name: start(config, name, keys[:1]) for name in config.optimizers}, corpus)
    relative = np.median(seconds / seconds[0], axis=1)
    unit = f"time per step, {config.optimizers[0]} = 1"
    tools.report_runs(
        config,
        "Optimizers at equal tokens",
        [row | {unit: x} for row, x in zip(rows, relative, strict=True)],
        description=(
            f"{config.steps * config.batch_size * config.seq_len:,} bytes of text; best rate, mean of "
            f"{config.num_seeds} seeds; {1000 * np.median(seconds[0]):.1f} ms per step of {config.optimizers[0]}"
        ),
        curves={},
        plots={
            "Held-out loss at each learning rate": tools.report.ScatterChart(
                curves, "bits per byte", "peak learning rate", from_zero=False
            )
        },
    )


def tabulate(config, name, losses, size):
    """Return a row of the table, from held-out losses "rates seeds"."""
    by_rate = losses.mean(1)
    best = np.nan_to_num(by_rate, nan=np.inf).argmin()
    return {
        "run": name,
        "best rate": f"{config.rates[best]:.2g}",
        "bits per byte": by_rate[best],
        "spread of seeds": np.ptp(losses[best]),
        "bytes of state per parameter": size,
    }


def time_steps(config, step, states, corpus):
    """Time steps of one model in seconds, "optimizers steps". They take turns: other work slows all alike."""
    (batch,) = corpus.train.ordered(config.seq_len, config.batch_size, limit=1)
    rates = jnp.full(1, 1e-3)
    seconds = np.zeros((len(states), 1 + config.timed_steps))
    for turn in range(1 + config.timed_steps):
        for number, name in enumerate(states):
            start = time.perf_counter()
            models, opt_states, _ = jax.block_until_ready(step((name, batch, rates), *states[name]))
            seconds[number, turn] = time.perf_counter() - start
            states[name] = (models, opt_states)
    return seconds[:, 1:]  # the first step compiles


if __name__ == "__main__":
    train.run_cli(main, Config)
