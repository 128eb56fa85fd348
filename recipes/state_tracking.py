"""Compare mixers by state tracking: DeltaNet with negative eigenvalues carries parity to 16 times the training length.

    python recipes/state_tracking.py                      # parity and S3, a quarter of an hour on two shared cores
    python recipes/state_tracking.py --groups s5 --embed 64 --steps 5000 --mixers delta-product delta-product-negative
    python recipes/state_tracking.py --resume             # after Ctrl-C: complete runs are kept

The word problem (Merrill et al., arXiv:2404.08819, section 3): tokens are elements of a group, targets the products of
all so far; parity is the group of two. A mixer that tracks the state extrapolates. A linear recurrence without negative
eigenvalues cannot track parity (Grazzi et al., arXiv:2411.12537, theorem 1). docs/state_tracking.md has the results.
"""

from functools import partial
from pathlib import Path

import jax
import numpy as np

import zoo
from zoo import tools, train
from zoo.layers import Attention, DeltaNet, GatedDeltaProduct, Mamba, Mamba2, RMSNorm
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim
from zoo.text.synthetic import GROUPS

import optax


def mixer_factories(embed, heads):
    """Mixers by name. Convolutions have width 1, which is none: on short rows they could stand in for a state."""
    size = embed // heads
    norm = partial(RMSNorm, size, features=Dim("head_dim"))
    delta_net, delta_product = (partial(mixer, heads=heads, conv_width=1) for mixer in (DeltaNet, GatedDeltaProduct))
    return {
        "attention": partial(Attention, heads=heads, rotary=Rotary(size), qk_norm=norm),
        "mamba": partial(Mamba, conv_width=1),
        "mamba2": partial(Mamba2, heads=heads, head_dim=2 * embed // heads, state_dim=size, conv_width=1),
        "delta-net": delta_net,
        "delta-net-negative": partial(delta_net, negative_eigenvalues=True),
        "delta-product": partial(delta_product, negative_eigenvalues=False),
        "delta-product-negative": partial(delta_product, negative_eigenvalues=True),
    }


MIXERS = tuple(mixer_factories(2, 1))


def main(
    *,
    groups: tuple[str, ...] = ("parity", "s3"),
    mixers: tuple[str, ...] = MIXERS,
    embed: int = 32,
    layers: int = 1,
    heads: int = 4,
    mlp_dim: int | None = None,
    seq_len: int = 8,
    eval_seq_len: int = 128,
    batch_size: int = 32,
    steps: int = 800,
    rates: tuple[float, ...] = (2e-3, 5e-3, 1e-2, 2e-2),
    num_seeds: int = 2,
    warmup_steps: int = 50,
    weight_decay: float = 0.1,
    eval_rows: int = 128,
    eval_every: int = 200,
    run_options: train.RunOptions = train.RunOptions(Path("runs/state_tracking")),
) -> None:
    """Train each mixer on each group, all learning rates and seeds at once; extrapolate; compare.

    Args:
        groups: parity, s3, a4 (the even permutations of four), s5.
        mixers: Names of mixers.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Heads of a mixer, embed / heads wide each.
        mlp_dim: Width of the SwiGLU after each mixer; by default there is none.
        seq_len: Tokens per row of training.
        eval_seq_len: Tokens per row of evaluation.
        batch_size: Rows per step.
        steps: Optimizer steps of each run.
        rates: Peak learning rates, after linear warmup; cosine decay to zero.
        num_seeds: Initializations per learning rate.
        warmup_steps: Steps of linear warmup, at most half of all.
        weight_decay: AdamW's, of matrices and embeddings.
        eval_rows: Held-out rows for the accuracy.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, seed = dict(locals()), run_options.seed
    train.check_names("groups", groups, GROUPS)
    train.check_names("mixers", mixers, MIXERS)
    if min(steps, num_seeds, eval_rows, batch_size, seq_len) < 1 or eval_seq_len <= seq_len:
        sizes = f"{steps=}, {num_seeds=}, {eval_rows=}, {batch_size=} and {seq_len=}"
        raise ValueError(f"{sizes} are at least 1, and {eval_seq_len=} is more than that")
    learning_rates, keys = train.sweep_grid(rates, seeds=range(seed, seed + num_seeds))

    def make(group, mixer, key):
        options = {"vocab": len(GROUPS[group]), "embed": embed, "layers": layers, "mlp": mlp_dim, "tied": False}
        return zoo.models.Hybrid(**options, pattern=(mixer_factories(embed, heads)[mixer],), key=key)

    # The schedule peaks at 1, and the learning rate multiplies the updates: one program serves all rates.
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, 1.0, min(warmup_steps, steps // 2), steps))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    step = train.sweep_step(zoo.cross_entropy, optimizer)

    @train.sweep_map
    def accuracy(model, batch):  # per position
        return (model(batch["tokens"]).argmax(-1) == batch["targets"]).mean(0)

    rows, curves = [], {group: [] for group in groups}
    for name, group, mixer in [(f"{group}-{mixer}", group, mixer) for group in groups for mixer in mixers]:
        test = train.stack_rows(train.GroupWords(group, eval_seq_len, seed=2 * seed + 1), eval_rows)
        batches = train.ShuffledBatches(train.GroupWords(group, seq_len, seed=2 * seed), batch_size, seed=seed)
        models = train.sweep_models(partial(make, group, mixer), keys)
        opt_states = train.sweep_map(lambda model: optimizer.init(zoo.trainable(model)))(models)
        with train.Run(run_options.subrun(name), config=config | {"run": name}) as run:
            run.print_line(f"{name}: {len(rates)} learning rates, {num_seeds} seeds")
            models, opt_states = run.restore((models, opt_states), batches)
            for batch in run.steps(batches, steps, tokens=batch_size * seq_len * len(keys)):
                models, opt_states, metrics = step(batch, models, opt_states, learning_rates)
                run.log(**metrics, learning_rate=learning_rates * schedule(run.step - 1))
                if run.every(eval_every):
                    places = accuracy(models, test)
                    beyond = places[:, seq_len:].mean(1)
                    run.log(places=places, trained=places[beyond.argmax(), :seq_len].mean(), beyond=beyond.max())
                if run.due(eval_every):
                    run.save((models, opt_states), batches)
        batches.close()
        if run.stopped:
            return
        # The best of all learning rates and seeds on the test rows: the question is what can be learned.
        places = np.array(train.summary(run.directory)["places"])
        beyond, bins = places[:, seq_len:].mean(1), np.array_split(np.arange(eval_seq_len), 32)
        best, rate = places[beyond.argmax()], rates[beyond.argmax() // num_seeds]
        row = {"run": name, f"up to {seq_len} tokens": best[:seq_len].mean()}
        row |= {f"{seq_len} to {eval_seq_len}": beyond.max(), "median run": np.median(beyond), "best rate": rate}
        rows.append(row)
        curves[group].append(tools.report.Curve(mixer, [int(x[-1]) + 1 for x in bins], [best[x].mean() for x in bins]))
    plots = {}
    for group in groups:
        chance = {"chance": 1 / len(GROUPS[group])}
        plots[f"Accuracy by place: {group}"] = tools.report.LineChart(curves[group], "accuracy", "tokens", chance)
    tools.report_runs(
        run_options.out,
        "State tracking",
        rows,
        description=f"The best run of {len(keys)} per mixer",
        curves={},
        unit="accuracy",
        plots=plots,
        recipe=main,
    )


if __name__ == "__main__":
    train.run_cli(main)
