"""Compare mixers by state tracking: DeltaNet with negative eigenvalues carries parity to 16 times the training length.

    python recipes/state_tracking.py                      # parity and S3, a quarter of an hour on two shared cores
    python recipes/state_tracking.py --groups s5 --embed 64 --steps 5000 --mixers delta-product delta-product-negative
    python recipes/state_tracking.py --resume             # after Ctrl-C: complete runs are kept

The word problem (Merrill et al., arXiv:2404.08819, section 3): tokens are elements of a group, targets the products of
all so far; parity is the group of two. A mixer that tracks the state extrapolates. A linear recurrence without negative
eigenvalues cannot track parity (Grazzi et al., arXiv:2411.12537, theorem 1). docs/state_tracking.md has the results.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax

import zoo
from zoo import layers, tools, train
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim
from zoo.text.tasks.synthetic import GROUPS, GroupWords


def mixer_factories(embed, heads):
    """Mixers by name. Convolutions have width 1, which is none: on short rows they could stand in for a state."""
    size = embed // heads
    norm = partial(layers.RMSNorm, size, features=Dim("head_dim"))
    attention: dict[str, Any] = {"heads": heads, "rotary": Rotary(size), "qk_norm": norm}
    mamba: dict[str, Any] = {"heads": heads, "head_dim": 2 * size, "state_dim": size}
    delta: dict[str, Any] = {"heads": heads, "conv_width": 1}
    return {
        "attention": partial(layers.Attention, **attention),
        "forgetting-attention": partial(layers.ForgettingAttention, **attention),
        "hgrn2": partial(layers.HGRN2, heads=heads),
        "mlstm": partial(layers.MLSTM, heads=heads),
        "mamba": partial(layers.Mamba, conv_width=1),
        "mamba2": partial(layers.Mamba2, **mamba, conv_width=1),
        "mamba3": partial(layers.Mamba3, **mamba),
        "mesa-net": partial(layers.MesaNet, **delta),
        "rwkv7": partial(layers.RWKV7, heads=heads),
        "delta-net": partial(layers.DeltaNet, **delta),
        "delta-net-negative": partial(layers.DeltaNet, **delta, negative_eigenvalues=True),
        "delta-product": partial(layers.GatedDeltaProduct, **delta, negative_eigenvalues=False),
        "delta-product-negative": partial(layers.GatedDeltaProduct, **delta, negative_eigenvalues=True),
        "comba": partial(layers.Comba, **delta),
        "kimi-delta-attention": partial(layers.KimiDeltaAttention, **delta),
        "kimi-delta-attention-negative": partial(layers.KimiDeltaAttention, **delta, negative_eigenvalues=True),
        "gated-delta-net-2": partial(layers.GatedDeltaNet2, **delta),
        "gated-delta-net-2-negative": partial(layers.GatedDeltaNet2, **delta, negative_eigenvalues=True),
    }


MIXERS = tuple(mixer_factories(2, 1))
DEFAULT = (
    *("attention", "mamba", "mamba2", "delta-net", "delta-net-negative"),
    *("delta-product", "delta-product-negative"),
)


@dataclass(frozen=True)
class Config(train.SweepConfig):  # batch_size, steps, rates, num_seeds, ...
    """Train each mixer on each group, all learning rates and seeds at once; extrapolate; compare."""

    groups: tuple[str, ...] = ("parity", "s3")  # parity, s3, a4 (the even permutations of four), s5.
    mixers: tuple[str, ...] = DEFAULT  # Names of mixers; `mixer_factories` has more.
    embed: int = 32  # Width of the residual stream.
    layers: int = 1  # Number of mixers; there are no MLPs.
    heads: int = 4  # Heads of a mixer, embed / heads wide each.
    seq_len: int = 8  # Tokens per row of training.
    eval_seq_len: int = 128  # Tokens per row of evaluation.
    steps: int = 800
    rates: tuple[float, ...] = (2e-3, 5e-3, 1e-2, 2e-2)
    num_seeds: int = 2
    eval_rows: int = 128
    eval_every: int = 200
    run: train.RunOptions = train.RunOptions(Path("runs/state_tracking"))


def make_model(config, group, mixer, key):
    sizes = {"vocab": len(GROUPS[group]), "embed": config.embed, "layers": config.layers}
    pattern = [mixer_factories(config.embed, config.heads)[mixer]]
    return zoo.models.Hybrid(**sizes, pattern=pattern, tied=False, key=key)


def main(config: Config) -> None:
    train.check_names("groups", config.groups, GROUPS)
    train.check_names("mixers", config.mixers, MIXERS)
    if config.eval_seq_len <= config.seq_len:
        raise ValueError(f"eval_seq_len={config.eval_seq_len} is not more than seq_len={config.seq_len}")
    seed = config.run.seed
    rates, keys = train.sweep_grid(config.rates, seeds=range(seed, seed + config.num_seeds))
    schedule = train.warmup_cosine(1.0, config.warmup_steps, config.steps, end=0.0)

    def make_optimizer(rate):  # a traced number: all rates and seeds are one program
        adamw = train.make_optimizer("adamw", lambda step: rate * schedule(step), weight_decay=config.weight_decay)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    step = train.sweep_step(zoo.cross_entropy, make_optimizer)

    @train.sweep_map
    def accuracy(model, batch):  # per position
        return (model(batch["tokens"]).argmax(-1) == batch["targets"]).mean(0)

    rows = []
    best = {group: {} for group in config.groups}
    for group, mixer in [(group, mixer) for group in config.groups for mixer in config.mixers]:
        test = train.stack_rows(GroupWords(group, config.eval_seq_len, seed=2 * seed + 1), config.eval_rows)
        batches = train.ShuffledBatches(GroupWords(group, config.seq_len, seed=2 * seed), config.batch_size, seed=seed)
        init_fn = partial(make_model, config, group, mixer)
        models, opt_states = train.sweep_init(init_fn, make_optimizer, rates, keys)

        with train.Run(config, name=f"{group}-{mixer}") as run:
            run.print_line(f"{run.name}: {len(config.rates)} learning rates, {config.num_seeds} seeds")
            models, opt_states = run.restore((models, opt_states), batches)
            for batch in run.steps(batches, config.steps, tokens=config.batch_size * config.seq_len * len(keys)):
                models, opt_states, metrics = step(batch, models, opt_states, rates)
                run.log(**metrics, learning_rate=rates * schedule(run.step - 1))
                if run.every(config.eval_every):
                    places = accuracy(models, test)
                    run.log(places=places, beyond=places[:, config.seq_len :].mean(1).max())
                if run.due(config.eval_every):
                    run.save((models, opt_states), batches)
        batches.close()
        if run.stopped:
            return

        # The best of all learning rates and seeds on the test rows: the question is what can be learned.
        places = np.array(train.summary(run.directory)["places"])
        beyond = places[:, config.seq_len :].mean(1)
        best[group][mixer] = places[beyond.argmax()]
        row = {
            "run": run.name,
            f"up to {config.seq_len} tokens": best[group][mixer][: config.seq_len].mean(),
            f"{config.seq_len} to {config.eval_seq_len}": beyond.max(),
            "median run": np.median(beyond),
            "best rate": config.rates[beyond.argmax() // config.num_seeds],
        }
        rows.append(row)

    tools.report_runs(
        config,
        "State tracking",
        rows,
        description=f"The best run of {len(keys)} per mixer",
        curves={},
        unit="accuracy",
        plots={f"Accuracy by place: {group}": draw(group, best[group]) for group in config.groups},
    )


def draw(group, best):
    """Chart the accuracy by place of each mixer, in 32 bins."""
    curves = []
    for mixer, places in best.items():
        bins = np.array_split(np.arange(len(places)), 32)
        ends = [int(each[-1]) + 1 for each in bins]
        curves.append(tools.report.Curve(mixer, ends, [places[each].mean() for each in bins]))
    return tools.report.LineChart(curves, "accuracy", "tokens", {"chance": 1 / len(GROUPS[group])})


if __name__ == "__main__":
    train.run_cli(main, Config)
