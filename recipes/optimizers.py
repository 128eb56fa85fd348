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
class Config(train.SweepConfig):  # batch_size, steps, num_seeds, ...
    """Train with each optimizer, all learning rates and seeds at once; compare."""

    data: tuple[Path, ...] = ()  # Files, directories and URLs of text; by default this Python's standard library.
    # Names of optimizers; the first one's step is the unit of time. Learning rates of prodigy are near 1.
    optimizers: tuple[train.OptimizerName, ...] = ("adamw", "muon", "lion", "schedule_free", "ademamix")
    # Peak learning rates, the same for all optimizers: powers of two.
    rates: tuple[float, ...] = tuple(2.0**power for power in range(-10, -2))
    embed: int = 64  # Width of the residual stream.
    layers: int = 2  # Number of blocks.
    heads: int = 2  # Attention heads, embed / heads wide each.
    mlp_dim: int = 192  # Width of the gated MLP.
    seq_len: int = 64  # Bytes per row.
    num_seeds: int = 2
    batch_size: int = 16
    steps: int = 300
    # Steps of linear warmup, at most half of all. Then a cosine to zero, for schedule_free a constant.
    warmup_steps: int = 30
    eval_rows: int = 256
    eval_every: int = 150
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


def make_optimizer(config, name, rate):
    """Make an optimizer with a peak learning rate that is a traced number: all rates and seeds are one program."""
    schedule = make_schedule(config, name)
    named = train.make_optimizer(name, lambda step: rate * schedule(step), weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), named)


def main(config: Config) -> None:
    train.check_names("optimizers", config.optimizers, OPTIMIZERS)
    seed = config.run.seed
    rates, keys = train.sweep_grid(config.rates, seeds=range(seed, seed + config.num_seeds))
    corpus = train.load_text(config.data)
    (held_out,) = corpus.validation.ordered(config.seq_len, config.eval_rows, limit=1)

    @train.sweep_map
    def evaluate(run, batch):
        model, opt_state = run
        total, count = zoo.cross_entropy(train.eval_params(opt_state, model), batch)  # of schedule_free's average
        return train.bits_per_byte(total / count, corpus.validation)

    init_fn = partial(make_model, config)
    optimizers = {name: partial(make_optimizer, config, name) for name in config.optimizers}
    steps = {name: train.sweep_step(zoo.cross_entropy, optimizers[name]) for name in config.optimizers}
    rows = []
    curves = []
    for name in config.optimizers:
        batches = corpus.train.batches(config.seq_len, config.batch_size, seed=seed)
        schedule = make_schedule(config, name)
        with train.Run(config, name=name, data=corpus) as run:
            run.print_line(f"{name}: {len(config.rates)} learning rates, {config.num_seeds} seeds; {corpus}")
            start = train.sweep_init(init_fn, optimizers[name], rates, keys)
            models, opt_states = run.restore(start, batches)
            for batch in run.steps(batches, config.steps, tokens=config.batch_size * config.seq_len * len(keys)):
                models, opt_states, metrics = steps[name](batch, models, opt_states, rates)
                run.log(**metrics, learning_rate=rates * schedule(run.step - 1))
                if run.every(config.eval_every):
                    losses = evaluate((models, opt_states), held_out).reshape(len(config.rates), config.num_seeds)
                    run.log(held_out=losses, validation=jnp.nanmin(losses.mean(1)))
                if run.due(config.eval_every):
                    run.save((models, opt_states), batches)
        batches.close()
        if run.stopped:
            return
        losses = np.array(train.summary(run.directory)["held_out"], float)
        model = eqx.filter_eval_shape(init_fn, keys[0])
        size = sum(x.nbytes for x in jax.tree.leaves(opt_states)) / len(keys) / zoo.count(model)
        rows.append(tabulate(config, name, losses, size))
        curves.append(tools.report.Curve(name, config.rates, losses.mean(1)))

    (batch,) = corpus.train.ordered(config.seq_len, config.batch_size, limit=1)
    starts = {name: train.sweep_init(init_fn, optimizers[name], rates[:1], keys[:1]) for name in config.optimizers}
    seconds = time_steps(steps, starts, batch, config.timed_steps)
    relative = np.median(seconds / seconds[0], axis=1)
    chart = tools.report.ScatterChart(curves, "bits per byte", "peak learning rate", from_zero=False)
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
        plots={"Held-out loss at each learning rate": chart},
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


def time_steps(steps, states, batch, turns):
    """Time steps of one model in seconds, "optimizers turns". They take turns: other work slows all alike."""
    rates = jnp.full(1, 1e-3)
    seconds = np.zeros((len(steps), 1 + turns))
    for turn in range(1 + turns):
        for number, name in enumerate(steps):
            start = time.perf_counter()
            models, opt_states, _ = jax.block_until_ready(steps[name](batch, *states[name], rates))
            seconds[number, turn] = time.perf_counter() - start
            states[name] = (models, opt_states)
    return seconds[:, 1:]  # the first step compiles


if __name__ == "__main__":
    train.run_cli(main, Config)
