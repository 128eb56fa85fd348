"""Fit scaling laws to isoFLOP curves, and predict a held-out budget: 2.213 bits per byte, where 2.205 is measured.

    python recipes/scaling.py                             # six widths, five budgets, two seeds: 7 minutes, two cores
    python recipes/scaling.py --widths 32 48 64 96 128 --budgets 4e11 8e11 16e11 32e11 --out runs/larger
    python recipes/scaling.py --resume                    # after Ctrl-C: complete widths are kept

Approach 2 of Hoffmann et al. (arXiv:2203.15556, section 3.2). At each budget of C FLOPs, models of several widths read
as many tokens as the budget pays for. A parabola of loss over log N has its minimum at the best size N*(C). Then
log N* = a log C + b, with a = 0.60 (0.48 to 0.70), and L* = E + A C^-alpha. The largest budget is not fitted: it checks
the prediction.

A width is one run at a constant learning rate. At each budget a copy of the model leaves it, with a short decay of the
rate (arXiv:2404.06395, arXiv:2405.18392). docs/scaling.md has the results.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.lib.stride_tricks import sliding_window_view

import zoo
from zoo import tools, train
from zoo.train.flops import count_step_flops


@dataclass(frozen=True)
class Config:
    """Train each width once, with a decay at each budget; fit the laws, predict the largest budget."""

    data: tuple[Path, ...] = ()  # Files, directories and URLs of text; by default this Python's standard library.
    widths: tuple[int, ...] = (16, 24, 32, 48, 64, 80)  # Widths of the residual stream, four or more.
    # Budgets of training in FLOPs, four or more. The last one is not fitted, but predicted.
    budgets: tuple[float, ...] = tuple(2.0**power for power in (36, 36.75, 37.5, 38.25, 39))
    layers: int = 2  # Number of blocks.
    head_dim: int = 8  # Width of a head; there are width / head_dim heads.
    seq_len: int = 64  # Bytes per row.
    batch_size: int = 8  # Rows per step.
    num_seeds: int = 2  # Initializations per width, trained at once.
    learning_rate: float = 2.0**-7  # Rate after warmup, at `base_width`. Other widths follow muP.
    base_width: int = 32  # Width at which the learning rate was tuned.
    warmup_steps: int = 10  # Steps of linear warmup.
    decay_share: float = 0.2  # Share of a budget's steps in which the rate decays to zero.
    weight_decay: float = 0.1  # Weight decay of matrices and embeddings, times the learning rate.
    eval_rows: int = 512  # Held-out rows to evaluate on.
    points: int = 4  # Adjacent widths that each parabola is fitted to: the lowest ones, four or more.
    draws: int = 1000  # Redrawn data sets for the intervals.
    save_every: int = 500  # Steps between checkpoints.
    run: train.RunOptions = train.RunOptions(Path("runs/scaling"))


def make_model(config, width, key):
    """Make the model to study. It may be any `Decoder` with a size that grows with `width`."""
    sizes = {"vocab": 256, "embed": width, "layers": config.layers, "heads": width // config.head_dim}
    return zoo.models.Transformer(**sizes, mlp=3 * width, qk_norm=True, key=key)


def make_optimizer(config, base, rate):
    """AdamW with the learning rates of muP, from a rate at the base width."""
    adam = (optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95), train.scale_by_width(base))
    decay = optax.add_decayed_weights(config.weight_decay, train.decay_mask)
    return optax.chain(*adam, decay, optax.scale_by_learning_rate(rate))


def count_flops(config, model):
    """Count the FLOPs of training on one token: matrix products of parameters and of attention."""
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.seq_len), "int32")
    flops = count_step_flops(model, tokens) / tokens.size
    if not flops:
        raise ValueError("the FLOPs of this model are not known: count_flops may return 6 zoo.count(model)")
    return flops


def plan_width(config, model):
    """Return the learning rates of a width's run, over the peak, and of its branches, by the step that they follow."""
    step_flops = count_flops(config, model) * config.batch_size * config.seq_len
    branches = {}
    for budget in config.budgets:
        steps = round(budget / step_flops)
        decay = max(round(config.decay_share * steps), 1)
        schedule = train.warmup_stable_decay(1.0, config.warmup_steps, steps, decay)
        branches[steps - decay] = np.asarray(schedule(np.arange(steps)))[steps - decay :]
    if len(branches) < len(config.budgets):
        raise ValueError(f"budgets={config.budgets}: two of them are the same number of steps")
    last = max(branches)
    stable = train.warmup_stable_decay(1.0, config.warmup_steps, last, decay_steps=0)
    return np.asarray(stable(np.arange(last))), branches


def main(config: Config) -> None:
    check_grid(config)
    seeds = range(config.run.seed, config.run.seed + config.num_seeds)
    rates, keys = train.sweep_grid([config.learning_rate], seeds)
    base = eqx.filter_eval_shape(make_model, config, config.base_width, keys[0])
    shapes = {width: eqx.filter_eval_shape(make_model, config, width, keys[0]) for width in config.widths}
    plans = {width: plan_width(config, model) for width, model in shapes.items()}
    corpus = train.load_text(config.data)
    (held_out,) = corpus.validation.ordered(config.seq_len, config.eval_rows, limit=1)
    optimizer = partial(make_optimizer, config, base)
    step = train.sweep_step(zoo.cross_entropy, optimizer)

    @train.sweep_map
    def evaluate(model, batch):
        total, count = zoo.cross_entropy(model, batch)
        return train.bits_per_byte(total / count, corpus.validation)

    def init_fn(width, key):
        return train.transfer_width(make_model(config, width, key), base)

    def train_branch(state, position, schedule):
        """Train copies of the models at the rates of a branch, on the batches that follow; evaluate."""
        models, opt_states = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, state)
        following: Any = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed)
        following.restore(position)
        for rate in schedule:
            models, opt_states, _ = step(next(following), models, opt_states, rates * rate)
        following.close()
        return evaluate(models, held_out)

    losses = []
    for width, (trunk, branches) in plans.items():
        batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed)
        with train.Run(config, name=f"width-{width}", data=corpus) as run:
            run.print_line(f"{run.name}: {zoo.count(shapes[width]):,} parameters, {config.num_seeds} seeds")
            start = train.sweep_init(partial(init_fn, width), optimizer, rates, keys)
            models, opt_states = run.restore(start, batches)
            for batch in run.steps(batches, len(trunk), tokens=config.batch_size * config.seq_len * config.num_seeds):
                models, opt_states, metrics = step(batch, models, opt_states, rates * trunk[run.step - 1])
                run.log(**metrics, learning_rate=rates * trunk[run.step - 1])
                if run.step in branches:
                    run.log(held_out=train_branch((models, opt_states), batches.state, branches[run.step]))
                if run.due(config.save_every):
                    run.save((models, opt_states), batches)
        batches.close()
        if run.stopped:
            return
        losses.append(read_losses(run.directory, branches))

    report(config, shapes, np.swapaxes(losses, 0, 1))


def check_grid(config):
    for name, numbers in (("widths", config.widths), ("budgets", config.budgets)):
        if len(numbers) < 4 or min(numbers) <= 0 or list(numbers) != sorted(set(numbers)):
            raise ValueError(f"{name}={numbers}: expected four or more numbers above 0 that increase")
    if not 4 <= config.points <= len(config.widths):
        raise ValueError(f"points={config.points}: expected at least 4 and at most all {len(config.widths)} widths")
    if any(width % config.head_dim for width in (*config.widths, config.base_width)):
        names = f"widths={config.widths}, base_width={config.base_width}"
        raise ValueError(f"{names}: expected multiples of head_dim={config.head_dim}")


def read_losses(directory, branches):
    """Return the losses "budgets seeds" that a width's run logged where its branches leave."""
    lines = train.read_metrics(directory / "metrics.jsonl")
    found = {line["step"]: line["held_out"] for line in lines if "held_out" in line}
    if not branches.keys() <= found.keys():
        raise ValueError(f"{directory} has branches of other budgets: choose another folder (--out)")
    return [found[start] for start in branches]


class Minima(NamedTuple):
    """The lowest points of parabolas, whether they lie between the fitted sizes, and sums of squared residuals."""

    sizes: np.ndarray
    losses: np.ndarray
    inside: np.ndarray
    errors: np.ndarray


class Laws(NamedTuple):
    """Exponents, the irreducible loss E, and best sizes and losses that the laws predict, "... budgets"."""

    a: np.ndarray
    alpha: np.ndarray
    E: np.ndarray
    sizes: np.ndarray
    losses: np.ndarray


def find_minima(sizes, losses, points):
    """Fit a parabola of loss over log N to each row of losses "... sizes", in the lowest `points` adjacent sizes.

    A minimum outside these would be extrapolated: the best measured point takes its place.
    """
    x = sliding_window_view(np.log(sizes), points)
    designs = np.stack([np.vander(row, 3) for row in x])
    windows = sliding_window_view(losses, points, axis=-1)
    coefficients = np.einsum("wcp,...wp->...wc", np.linalg.pinv(designs), windows)
    residuals = windows - np.einsum("wpc,...wc->...wp", designs, coefficients)
    lowest = windows.sum(-1).argmin(-1)[..., None]
    curvature, slope, offset = np.moveaxis(np.take_along_axis(coefficients, lowest[..., None], -2)[..., 0, :], -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        vertex = -slope / (2 * curvature)
    first, last = (x[lowest[..., 0], end] for end in (0, -1))
    inside = (curvature > 0) & (first < vertex) & (vertex < last)
    vertex = np.where(inside, vertex, np.log(sizes)[losses.argmin(-1)])
    best_losses = np.where(inside, offset - curvature * vertex**2, losses.min(-1))
    errors = np.take_along_axis((residuals**2).sum(-1), lowest, -1)[..., 0]
    return Minima(np.exp(vertex), best_losses, inside, errors)


def fit_power_law(compute, losses):
    """Fit L = E + A C^-alpha to losses "... budgets" by least squares, with E >= 0; return E, A and alpha.

    For each alpha of a grid, E and A are linear coefficients.
    """
    alphas = np.geomspace(0.01, 3, 600)
    unit = np.exp(np.log(compute).mean())
    powers = (compute / unit) ** -alphas[:, None]
    centered = powers - powers.mean(-1, keepdims=True)
    scales = losses @ (centered / (centered**2).sum(-1, keepdims=True)).T
    limits = losses.mean(-1)[..., None] - scales * powers.mean(-1)
    through_zero = losses @ (powers / (powers**2).sum(-1, keepdims=True)).T
    scales = np.where(limits < 0, through_zero, scales)
    limits = np.maximum(limits, 0)
    fitted = limits[..., None] + scales[..., None] * powers
    best = ((losses[..., None, :] - fitted) ** 2).sum(-1).argmin(-1)
    E, A = (np.take_along_axis(x, best[..., None], -1)[..., 0] for x in (limits, scales))
    return E, A * unit ** alphas[best], alphas[best]


def fit_laws(budgets, minima, targets):
    """Fit both laws to minima "... budgets", and predict the best sizes and losses of other budgets."""
    x = np.log(budgets)
    a, b = np.moveaxis(np.log(minima.sizes) @ np.linalg.pinv(np.vander(x, 2)).T, -1, 0)
    E, A, alpha = fit_power_law(budgets, minima.losses)
    best_sizes = np.exp(a[..., None] * np.log(targets) + b[..., None])
    return Laws(a, alpha, E, best_sizes, E[..., None] + A[..., None] * targets ** -alpha[..., None])


def redraw_losses(losses, errors, freedom, draws, seed):
    """Add normal noise to losses, in `draws` data sets.

    Its variance is known only from squared residuals and their degrees of freedom: it is drawn too, as error / chi^2.
    For a linear fit, intervals are then Student's t.
    """
    generator = np.random.default_rng(seed)
    scale = np.sqrt(errors.sum() / generator.chisquare(freedom, draws))
    return losses + scale[:, None, None] * generator.normal(size=(draws, *losses.shape))


def find_interval(values):
    return np.quantile(values, (0.025, 0.975), axis=0)


def predict_last(config, sizes, losses):
    """Fit the laws to losses "budgets sizes" of all budgets but the last, and predict the last.

    Returns the laws, the laws of redrawn losses, and rows of a table: value, interval, and what was measured.
    """
    budgets = np.array(config.budgets)
    minima = find_minima(sizes, losses, config.points)
    fitted = Minima(*(x[:-1] for x in minima))
    freedom = len(fitted.sizes) * (config.points - 3)
    redrawn = redraw_losses(losses[:-1], fitted.errors, freedom, config.draws, config.run.seed)
    again = find_minima(sizes, redrawn, config.points)
    laws = fit_laws(budgets[:-1], fitted, budgets)
    draws = fit_laws(budgets[:-1], again, budgets)
    # A measured minimum has noise of its own: intervals of predictions get the noise of another draw's last minimum.
    size_draws = draws.sizes[:, -1] * np.roll(again.sizes[:, -1], 1) / fitted.sizes[-1]
    loss_draws = draws.losses[:, -1] + np.roll(again.losses[:, -1], 1) - fitted.losses[-1]
    rows = [
        tabulate("a of log N* = a log C + b", laws.a, draws.a),
        tabulate("alpha of L* = E + A C^-alpha", laws.alpha, draws.alpha),
        tabulate("E, bits per byte", laws.E, draws.E),
        tabulate("best parameters of the last budget", laws.sizes[-1], size_draws, minima.sizes[-1]),
        tabulate("bits per byte of the last budget", laws.losses[-1], loss_draws, minima.losses[-1]),
    ]
    return laws, draws, rows


def tabulate(name, value, draws, measured=None):
    """Return a row of a table: a fitted value, its interval, and for a prediction what was measured."""
    low, high = find_interval(draws)
    row = {"": name, "value": f"{value:.4g}", "low": f"{low:.4g}", "high": f"{high:.4g}", "measured": "", "inside": ""}
    if measured is None:
        return row
    return row | {"measured": f"{measured:.4g}", "inside": "yes" if low <= measured <= high else "no"}


def report(config, models, losses):
    """Write the report, from models by width and losses "budgets widths seeds"."""
    sizes = np.array([zoo.count(model) for model in models.values()])
    flops = np.array([count_flops(config, model) for model in models.values()])
    means = losses.mean(-1)
    minima = find_minima(sizes, means, config.points)
    laws, draws, predictions = predict_last(config, sizes, means)
    for row in predictions:
        print(", ".join(f"{name} {value}".strip() for name, value in row.items() if value))

    names = [f"{budget:.3g}" for budget in config.budgets]
    runs = []
    for number, width in enumerate(config.widths):
        row = {"run": f"width-{width}", "parameters": int(sizes[number]), "FLOPs per token": int(flops[number])}
        by_budget = dict(zip(names, means[:, number].tolist(), strict=True))
        runs.append(row | by_budget | {"spread of seeds": float(np.ptp(losses[:, number], axis=-1).mean())})
    best = []
    for name, budget, size, loss, inside in zip(names, config.budgets, *minima[:3], strict=True):
        tokens = budget / np.interp(np.log(size), np.log(sizes), flops)
        row = {"FLOPs": name, "best parameters": round(size), "tokens": round(tokens)}
        row |= {"tokens per parameter": round(tokens / size, 1), "bits per byte": float(loss)}
        best.append(row | {"minimum": "inside" if inside else "edge"})

    def curve(label, x, values, dots=True):
        return tools.report.Curve(label, list(x), list(values), dots=dots)

    low, high = find_interval(draws.losses)
    isoflop = [curve(f"{name} FLOPs", sizes, row) for name, row in zip(names, means, strict=True)]
    minimum = curve("minima of parabolas", minima.sizes, minima.losses)
    by_compute = [
        curve("measured, the last held out", config.budgets, minima.losses),
        curve("fit without the last", config.budgets, laws.losses, dots=False),
        curve("interval, low", config.budgets, low, dots=False),
        curve("interval, high", config.budgets, high, dots=False),
    ]
    chart = partial(tools.report.ScatterChart, unit="bits per byte", from_zero=False)
    tools.report_runs(
        config,
        "Scaling laws",
        runs,
        description=f"Mean of {config.num_seeds} seeds; minima inside the grid: {minima.inside.sum()} of {len(names)}",
        curves={},
        plots={
            "Loss against parameters at equal FLOPs": chart([*isoflop, minimum], x_label="parameters"),
            "Lowest loss against FLOPs": chart(by_compute, x_label="FLOPs"),
        },
        tables={"Best sizes": best, "Laws, with intervals of 95%": predictions},
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
