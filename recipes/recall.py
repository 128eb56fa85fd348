"""Compare mixers by associative recall and bytes of state: attention recalls all, DeltaNet all from 5.5 kB on.

    python recipes/recall.py                              # all mixers at two widths, in sequence
    python recipes/recall.py --mixers attention delta-net --widths 32
    python recipes/recall.py --resume                     # after Ctrl-C: complete runs are kept
    python recipes/recall.py paper --seq-len 512 --num-pairs 64   # the sizes of the paper, for an accelerator

Multi-query associative recall (Zoology, arXiv:2312.04927, section 4): a row has `num_pairs` keys, each followed by its
value, and later every key once as a query; the model predicts its value. A model has two layers without MLPs: a gated
short convolution, which brings a key to its value's position, and the mixer. Each mixer is trained at every learning
rate at once, and the best one counts. docs/recall.md has the results.
"""

from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

import zoo
from zoo import layers, tools, train
from zoo.parallel import Dim

import optax

PRESETS = {"small": {}, "paper": {
    "widths": (64, 128, 256, 512), "vocab": 8192, "seq_len": 256, "num_pairs": 16, "batch_size": 256, "steps": 25_000,
    "rates": (1e-4, 4.6e-4, 2.2e-3, 1e-2), "eval_rows": 3_000,
}}  # fmt: skip
MIXERS = {
    "attention": layers.Attention, "linear-attention": layers.LinearAttention, "retention": layers.Retention,
    "gated-linear-attention": layers.GatedLinearAttention, "hgrn2": layers.HGRN2, "mlstm": layers.MLSTM,
    "delta-net": layers.DeltaNet, "gated-delta-net": layers.GatedDeltaNet, "mamba": layers.Mamba,
    "kimi-delta-attention": layers.KimiDeltaAttention, "mamba2": layers.Mamba2, "rwkv7": layers.RWKV7,
}  # fmt: skip


def make(mixer, width, vocab, key):
    """A model with one head, as wide as the residual stream; Mamba-2's is twice as wide, as in its paper."""
    norm = partial(layers.RMSNorm, width, features=Dim("head_dim"))
    mamba2 = {"heads": 1, "head_dim": 2 * width, "state_dim": width}
    options = {"attention": {"heads": 1, "qk_norm": norm}, "mamba": {}, "mamba2": mamba2}.get(mixer, {"heads": 1})
    pattern = (layers.GatedConvolution, partial(MIXERS[mixer], **options))
    return zoo.models.Hybrid(vocab=vocab, embed=width, layers=2, pattern=pattern, tied=False, key=key)


def main(
    *,
    mixers: tuple[str, ...] = tuple(MIXERS),
    widths: tuple[int, ...] = (16, 32),
    vocab: int = 128,
    seq_len: int = 64,
    num_pairs: int = 12,
    gap_exponent: float = 0.01,
    batch_size: int = 32,
    steps: int = 500,
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2),
    num_seeds: int = 1,
    warmup_steps: int = 50,
    weight_decay: float = 0.1,
    eval_rows: int = 512,
    eval_every: int = 100,
    run_options: train.RunOptions = train.RunOptions(Path("runs/recall")),
) -> None:
    """Train each mixer at each width, all learning rates and seeds at once; compare.

    Args:
        mixers: Names of mixers.
        widths: Widths of the residual stream, and of the mixers' heads.
        vocab: Tokens, half of them keys, half values.
        seq_len: Tokens per row.
        num_pairs: Key-value pairs per row, and queries.
        gap_exponent: A gap g before a query has probability proportional to g ** (gap_exponent - 1).
        batch_size: Rows per step.
        steps: Optimizer steps of each run.
        rates: Peak learning rates, after linear warmup; cosine decay to zero.
        num_seeds: Initializations per learning rate, whose mean counts.
        warmup_steps: Steps of linear warmup, at most half of all.
        weight_decay: AdamW's, of matrices and embeddings.
        eval_rows: Held-out rows for the accuracy.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, seed = dict(locals()), run_options.seed
    train.check_names("mixers", mixers, MIXERS)
    if not widths or min(steps, num_seeds, eval_rows, batch_size, *widths) < 1:
        raise ValueError(f"{steps=}, {num_seeds=}, {eval_rows=}, {batch_size=} and each of {widths=} are at least 1")
    learning_rates, keys = train.sweep_grid(rates, seeds=range(seed, seed + num_seeds))
    dataset = partial(train.AssociativeRecall, vocab, seq_len, num_pairs, gap_exponent=gap_exponent)
    task, test = dataset(seed=2 * seed), train.stack_rows(dataset(seed=2 * seed + 1), eval_rows)

    # The schedule peaks at 1, and the learning rate multiplies the updates: one program serves all rates.
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, 1.0, min(warmup_steps, steps // 2), steps))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    step = train.sweep_step(zoo.cross_entropy, optimizer)

    @train.sweep_map
    def accuracy(model, batch):
        correct = model(batch["tokens"]).argmax(-1) == batch["targets"]
        return (correct * batch["weights"]).sum() / batch["weights"].sum()

    rows = []
    for mixer, width in [(mixer, width) for mixer in mixers for width in widths]:
        name, init_fn = f"{mixer}-{width}", partial(make, mixer, width, vocab)
        models = train.sweep_models(init_fn, keys)
        opt_states = train.sweep_map(lambda model: optimizer.init(zoo.trainable(model)))(models)
        batches = train.ShuffledBatches(task, batch_size, seed=seed)
        with train.Run(run_options.subrun(name), config=config | {"run": name}) as run:
            run.print_line(f"{name}: {len(rates)} learning rates, {num_seeds} seeds")
            models, opt_states = run.restore((models, opt_states), batches)
            for batch in run.steps(batches, steps, tokens=batch_size * seq_len * len(keys)):
                models, opt_states, metrics = step(batch, models, opt_states, learning_rates)
                run.log(**metrics, learning_rate=learning_rates * schedule(run.step - 1))
                if run.every(eval_every):
                    accuracies = accuracy(models, test).reshape(len(rates), num_seeds)
                    run.log(accuracies=accuracies, accuracy=accuracies.mean(1).max())
                if run.due(eval_every):
                    run.save((models, opt_states), batches)
        batches.close()
        if run.stopped:
            return
        last, shapes = train.summary(run.directory), eqx.filter_eval_shape(init_fn, keys[0])
        by_rate, state_bytes = np.mean(last["accuracies"], axis=1), zoo.inspect.state_bytes(shapes, seq_len)
        row = {"run": name, "mixer": mixer, "parameters": zoo.count(shapes), "bytes of state": state_bytes}
        row |= {"accuracy": last["accuracy"], "best rate": rates[by_rate.argmax()]}
        rows.append(row | {"at all rates": " ".join(f"{accuracy:.2f}" for accuracy in by_rate)})
    chart = tools.report.ScatterChart.of_rows(
        rows, "mixer", x="bytes of state", values="accuracy", unit="accuracy", x_label="bytes of state per row"
    )
    tools.report_runs(
        run_options.out,
        "Recall and bytes of state",
        rows,
        description=f"{num_pairs} pairs in {seq_len} tokens; best learning rate, mean of {num_seeds} seeds",
        curves={},
        unit="accuracy",
        plots={"Accuracy": chart},
        recipe=main,
    )


if __name__ == "__main__":
    train.run_cli(main, presets=PRESETS)
