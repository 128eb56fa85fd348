"""Compare mixers by associative recall and bytes of state: attention recalls all, DeltaNet all from 5.5 kB on.

    python recipes/recall.py                              # all mixers at two widths, in sequence
    python recipes/recall.py --mixers attention delta-net --widths 32
    python recipes/recall.py --resume                     # after Ctrl-C: complete runs are kept

Multi-query associative recall (Zoology, arXiv:2312.04927, section 4): a row has `num_pairs` keys, each followed by its
value, and later every key once as a query; the model predicts its value. A model has two layers without MLPs: a gated
short convolution, which brings a key to its value's position, and the mixer. Each mixer is trained at every learning
rate at once, and the best one counts. docs/recall.md has the results, and the sizes of the paper.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
import optax

import zoo
from zoo import layers, tools, train
from zoo.parallel import Dim
from zoo.text.tasks.synthetic import AssociativeRecall


def mixer_factories(width):
    """Mixers by name, with one head as wide as the residual stream. Mamba-2's and Mamba-3's is twice as wide, as in
    their papers. Attention normalizes queries and keys, as delta rules do. Chosen blocks have 8 tokens."""
    norm = partial(layers.RMSNorm, width, features=Dim("head_dim"))
    wide: dict[str, Any] = {"heads": 1, "head_dim": 2 * width, "state_dim": width}
    return {
        "attention": partial(layers.Attention, heads=1, qk_norm=norm),
        "forgetting-attention": partial(layers.ForgettingAttention, heads=1, qk_norm=norm),
        "differential-attention": partial(layers.DifferentialAttention, heads=1),
        "moba": partial(layers.MixtureOfBlockAttention, heads=1, block=8, top=3, qk_norm=norm),
        "native-sparse-attention": partial(
            layers.NativeSparseAttention, heads=1, block=8, top=2, window=8, qk_norm=norm
        ),
        "linear-attention": partial(layers.LinearAttention, heads=1),
        "retention": partial(layers.Retention, heads=1),
        "gated-linear-attention": partial(layers.GatedLinearAttention, heads=1),
        "hgrn2": partial(layers.HGRN2, heads=1),
        "mlstm": partial(layers.MLSTM, heads=1),
        "mesa-net": partial(layers.MesaNet, heads=1),
        "delta-net": partial(layers.DeltaNet, heads=1),
        "gated-delta-net": partial(layers.GatedDeltaNet, heads=1),
        "gated-delta-net-2": partial(layers.GatedDeltaNet2, heads=1),
        "comba": partial(layers.Comba, heads=1),
        "kimi-delta-attention": partial(layers.KimiDeltaAttention, heads=1),
        "rwkv7": partial(layers.RWKV7, heads=1),
        "mamba": layers.Mamba,
        "mamba2": partial(layers.Mamba2, **wide),
        "mamba3": partial(layers.Mamba3, **wide),
    }


MIXERS = tuple(mixer_factories(8))


@dataclass(frozen=True)
class Config(train.SweepConfig):  # batch_size, steps, rates, num_seeds, ...
    """Train each mixer at each width, all learning rates and seeds at once; compare."""

    mixers: tuple[str, ...] = MIXERS  # Names of mixers.
    widths: tuple[int, ...] = (16, 32)  # Widths of the residual stream, and of the mixers' heads.
    vocab: int = 128  # Tokens, half of them keys, half values.
    seq_len: int = 64  # Tokens per row.
    num_pairs: int = 12  # Key-value pairs per row, and queries.
    run: train.RunOptions = train.RunOptions(Path("runs/recall"))


def make_model(mixer, width, vocab, key):
    pattern = (layers.GatedConvolution, mixer_factories(width)[mixer])
    return zoo.models.Hybrid(vocab=vocab, embed=width, layers=2, pattern=pattern, tied=False, key=key)


def main(config: Config) -> None:
    train.check_names("mixers", config.mixers, MIXERS)
    if not config.widths or min(config.widths) < 1:
        raise ValueError(f"widths={config.widths}: expected one or more numbers above 0")
    seed = config.run.seed
    rates, keys = train.sweep_grid(config.rates, seeds=range(seed, seed + config.num_seeds))
    sizes = (config.vocab, config.seq_len, config.num_pairs)
    task = AssociativeRecall(*sizes, seed=2 * seed)
    test = train.stack_rows(AssociativeRecall(*sizes, seed=2 * seed + 1), config.eval_rows)
    schedule = train.warmup_cosine(1.0, config.warmup_steps, config.steps, end=0.0)

    def make_optimizer(rate):  # a traced number: all rates and seeds are one program
        adamw = train.make_optimizer("adamw", lambda step: rate * schedule(step), weight_decay=config.weight_decay)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    step = train.sweep_step(zoo.cross_entropy, make_optimizer)

    @train.sweep_map
    def accuracy(model, batch):
        correct = model(batch["tokens"]).argmax(-1) == batch["targets"]
        return (correct * batch["weights"]).sum() / batch["weights"].sum()

    rows = []
    for mixer, width in [(mixer, width) for mixer in config.mixers for width in config.widths]:
        init_fn = partial(make_model, mixer, width, config.vocab)
        models, opt_states = train.sweep_init(init_fn, make_optimizer, rates, keys)
        batches = train.ShuffledBatches(task, config.batch_size, seed=seed)

        with train.Run(config, name=f"{mixer}-{width}") as run:
            run.print_line(f"{run.name}: {len(config.rates)} learning rates, {config.num_seeds} seeds")
            models, opt_states = run.restore((models, opt_states), batches)
            for batch in run.steps(batches, config.steps, tokens=config.batch_size * config.seq_len * len(keys)):
                models, opt_states, metrics = step(batch, models, opt_states, rates)
                run.log(**metrics, learning_rate=rates * schedule(run.step - 1))
                if run.every(config.eval_every):
                    accuracies = accuracy(models, test).reshape(len(config.rates), config.num_seeds)
                    run.log(accuracies=accuracies, accuracy=accuracies.mean(1).max())
                if run.due(config.eval_every):
                    run.save((models, opt_states), batches)
        batches.close()
        if run.stopped:
            return

        last = train.summary(run.directory)
        by_rate = np.mean(last["accuracies"], axis=1)
        model = eqx.filter_eval_shape(init_fn, keys[0])
        row = {
            "run": run.name,
            "mixer": mixer,
            "parameters": zoo.count(model),
            "bytes of state": zoo.inspect.state_bytes(model, config.seq_len),
            "accuracy": last["accuracy"],
            "best rate": config.rates[by_rate.argmax()],
            "at all rates": " ".join(f"{accuracy:.2f}" for accuracy in by_rate),
        }
        rows.append(row)

    chart = tools.report.ScatterChart.of_rows(
        rows, "mixer", x="bytes of state", values="accuracy", unit="accuracy", x_label="bytes of state per row"
    )
    tools.report_runs(
        config,
        "Recall and bytes of state",
        rows,
        description=f"{config.num_pairs} pairs in {config.seq_len} tokens; best rate, mean of {config.num_seeds} seeds",
        curves={},
        unit="accuracy",
        plots={"Accuracy": chart},
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
