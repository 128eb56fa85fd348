"""Compare mixers by recall and bytes of memory: attention recalls all, DeltaNet all from 5.5 kB on, others less.

    python recipes/recall.py                              # all mixers at two widths, one after another
    python recipes/recall.py --mixers attention delta-net --widths 32
    python recipes/recall.py --resume                     # after Ctrl-C: what is complete is read back
    python recipes/recall.py paper --seq-len 512 --num-pairs 64   # the sizes of the paper, for an accelerator

Multi-query associative recall (Zoology, arXiv:2312.04927, section 4): a row holds `pairs` keys, each followed by its
value, and later asks for every key once; the model says its value. Queries come the sooner the likelier, at gaps of a
power law. A model has two layers, without feed-forward parts: a gated short convolution, by which a value's place
learns its key, and the mixer. Each mixer is trained at every learning rate at once, and the best one counts.
docs/recall.md has what was measured, of five mixers, and what it does not say.
"""

from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from zoo import train  # isort: skip  (before optax: it says which command installs what is missing)
import optax

import zoo
from zoo.layers import (
    HGRN2,
    MLSTM,
    RWKV7,
    AbstractLinear,
    AbstractMixer,
    Attention,
    ConvState,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    Linear,
    LinearAttention,
    Mamba,
    Mamba2,
    RecurrenceContext,
    Retention,
    RMSNorm,
    ShortConvolution,
    TokenInfo,
)
from zoo.parallel import Dim

PRESETS = {
    "small": {},
    "paper": {
        "widths": (64, 128, 256, 512), "vocab": 8192, "seq_len": 256, "num_pairs": 16, "batch_size": 256, "steps": 25_000,
        "rates": (1e-4, 4.6e-4, 2.2e-3, 1e-2), "eval_rows": 3_000,
    },
}  # fmt: skip


def normed_attention(embed, heads, **options):
    """With norms of queries and keys, as delta rules have them."""
    return Attention(embed, heads, qk_norm=partial(RMSNorm, embed // heads, features=Dim("head_dim")), **options)


def mamba(embed, heads, **options):
    """Each of its channels is a head of its own."""
    return Mamba(embed, **options)


def mamba2(embed, heads, **options):
    """With heads of twice the width, as the paper has them, and a memory that is as deep as delta rules' is."""
    return Mamba2(embed, heads, head_dim=2 * embed // heads, state_dim=embed // heads, **options)


MIXERS = {  # each is called with the width and heads=
    "attention": normed_attention,
    "linear-attention": LinearAttention,
    "retention": Retention,
    "gated-linear-attention": GatedLinearAttention,
    "hgrn2": HGRN2,
    "mlstm": MLSTM,
    "delta-net": DeltaNet,
    "gated-delta-net": GatedDeltaNet,
    "kimi-delta-attention": KimiDeltaAttention,
    "mamba": mamba,
    "mamba2": mamba2,
    "rwkv7": RWKV7,
}


def make(mixer, width, vocab, key):
    pattern = (GatedConvolution, partial(MIXERS[mixer], heads=1))
    return zoo.models.Hybrid(vocab=vocab, embed=width, layers=2, pattern=pattern, tied=False, key=key)


class Recall:
    """Rows by number. Token 0 fills; keys are of the first half of the vocabulary, values of the second."""

    def __init__(self, vocab: int, seq: int, pairs: int, *, power: float = 0.01, seed: int = 0, rows: int = 100_000):
        if pairs < 1 or 4 * pairs > seq or pairs >= vocab // 2:
            raise ValueError(
                f"{pairs} pairs and as many queries want rows of at least {4 * pairs} tokens, not {seq}, and a "
                f"vocabulary of more than {2 * pairs + 1}, not {vocab}"
            )
        self.vocab, self.seq, self.pairs, self.seed, self.rows = vocab, seq, pairs, seed, rows
        gaps = np.arange(1, (seq - 2 * pairs) // 2 + 1) ** (power - 1)
        self.gaps = gaps / gaps.sum()

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        random = np.random.default_rng((self.seed, index))
        half = self.vocab // 2
        keys = 1 + random.choice(half - 1, self.pairs, replace=False)
        values = half + random.choice(self.vocab - half, self.pairs, replace=False)
        tokens, targets, weights = np.zeros(self.seq, np.int32), np.zeros(self.seq, np.int32), np.zeros(self.seq)
        tokens[: 2 * self.pairs] = np.stack([keys, values], axis=1).ravel()
        asked = 2 * self.pairs + 2 * random.choice(len(self.gaps), self.pairs, replace=False, p=self.gaps)
        tokens[asked], targets[asked], weights[asked] = keys, values, 1
        return {"tokens": tokens, "targets": targets, "weights": weights.astype(np.float32)}


class GatedConvolution(AbstractMixer):
    """y = W_out (W_gate x * convolution(W_in x)): the short one of BaseConv (arXiv:2312.04927, section 5)."""

    gate: AbstractLinear
    into: AbstractLinear
    convolution: ShortConvolution
    out: AbstractLinear

    def __init__(self, embed: int, *, width: int = 3, out_scale: float = 1.0, key: Key[Array, ""]):
        gate_key, in_key, key, out_key = jax.random.split(key, 4)
        stream, inner = Dim("embed"), Dim("inner")
        self.gate = Linear(embed, embed, in_=stream, out=inner, bias=True, key=gate_key)
        self.into = Linear(embed, embed, in_=stream, out=inner, key=in_key)
        self.convolution = ShortConvolution(embed, width, features=inner, bias=True, key=key)
        self.out = Linear(embed, embed, in_=inner, out=stream, scale=out_scale, key=out_key)

    def init_state(self, batch: int, length: int, dtype=jnp.float32) -> ConvState:
        return self.convolution.init_state(batch, dtype)

    def __call__(
        self, x: Float[Array, "batch seq embed"], info: TokenInfo, state: ConvState | None = None
    ) -> tuple[Float[Array, "batch seq embed"], ConvState | None]:
        mixed, state = self.convolution(self.into(x), RecurrenceContext.from_info(x, info, state), state)
        return self.out(self.gate(x) * mixed), state


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
    seed: int = 0,
    out: Path = Path("runs/recall"),
    resume: bool = False,
    profile: bool = False,
) -> None:
    """Train each mixer at each width, all learning rates and seeds at once; compare.

    Args:
        mixers: Which ones.
        widths: Of the residual stream, which are those of the mixers' heads too.
        vocab: Tokens, half of them keys, half values.
        seq_len: Tokens in a row.
        num_pairs: Keys with values in a row, and queries.
        gap_exponent: Of the law of gaps: a gap g has probability proportional to g ** (power - 1).
        batch_size: Rows in a step.
        steps: Optimizer steps of each run.
        rates: Peaks of the learning rate, after warm-up; each falls to zero as a cosine does.
        num_seeds: How many initial parameters each rate is tried with; the mean counts.
        warmup_steps: Steps of warm-up.
        weight_decay: Of matrices and embeddings, as in AdamW.
        eval_rows: Of held-out rows, what accuracy is measured on.
        eval_every: Steps between measurements, each with a checkpoint.
        seed: Of rows, and the first of the seeds of parameters.
        out: The folder of all runs.
        resume: Go on from the newest checkpoints in `out`.
        profile: Trace a few steps of each run into the folder `profile` of its own.
    """
    config = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    if not mixers or set(mixers) - MIXERS.keys():
        raise ValueError(f"name one or more of the mixers {', '.join(MIXERS)}, not {', '.join(mixers) or 'none'}")
    if not widths or min(steps, num_seeds, eval_rows, batch_size, *widths) < 1:
        raise ValueError(f"{steps=}, {num_seeds=}, {eval_rows=}, {batch_size=} and each of {widths=} are at least 1")
    learning_rates, keys = train.sweep_grid(rates, seeds=range(seed, seed + num_seeds))
    task, test = (Recall(vocab, seq_len, num_pairs, power=gap_exponent, seed=2 * seed + n) for n in range(2))
    held_out = [test[index] for index in range(eval_rows)]
    test = {name: jnp.stack([row[name] for row in held_out]) for name in held_out[0]}

    # A rate multiplies the updates, whose own peak is 1: a number like any other, so that one program serves all rates.
    # It runs on one device, without a mesh: models this small leave nothing to share out.
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, min(warmup_steps, steps // 2), steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    step = train.sweep_step(zoo.cross_entropy, optimizer)

    @train.sweep_map
    def accuracy(model, batch):
        """Of the queries, the part whose value has the largest logit."""
        right = model(batch["tokens"]).argmax(-1) == batch["targets"]
        return (right * batch["weights"]).sum() / batch["weights"].sum()

    table, folders = [], {}
    for mixer, width in [(mixer, width) for mixer in mixers for width in widths]:
        name = f"{mixer}-{width}"
        born = partial(make, mixer, width, vocab)
        shapes = eqx.filter_eval_shape(born, keys[0])
        models = train.sweep_models(born, keys)
        opt_states = train.sweep_map(lambda model: optimizer.init(zoo.trainable(model)))(models)
        batches = train.ShuffledBatches(task, batch_size, seed=seed)
        with train.Run(out / name, config=config | {"run": name}, resume=resume, profile=profile) as run:
            run.print_line(f"{name}: {zoo.count(shapes):,} parameters, {len(rates)} learning rates, {num_seeds} seeds")
            models, opt_states = run.restore((models, opt_states), batches)
            for inputs in run.steps(batches, steps, tokens=batch_size * seq_len * len(keys)):
                models, opt_states, losses = step(inputs, models, opt_states, learning_rates)
                run.log(losses=losses)
                if run.every(eval_every):
                    accuracies = accuracy(models, test).reshape(len(rates), num_seeds)
                    run.log(accuracies=accuracies, accuracy=accuracies.mean(1).max())
                if run.due(eval_every):
                    run.save((models, opt_states), batches)
        batches.close()
        if run.stopped:
            return
        folders[name] = out / name
        last = train.read_metrics(folders[name] / "metrics.jsonl")[-1]
        of_rates = np.mean(last["accuracies"], axis=1)
        table.append({
            "mixer": mixer,
            "width": width,
            "parameters": zoo.count(shapes),
            "bytes of state": zoo.inspect.state_bytes(shapes, seq_len),
            "accuracy": last["accuracy"],
            "at rate": rates[of_rates.argmax()],
            "at all rates": " ".join(f"{accuracy:.2f}" for accuracy in of_rates),
        })  # fmt: skip

    def of(mixer, name):
        return [row[name] for row in table if row["mixer"] == mixer]

    groups = [train.ScatterSeries(mixer, of(mixer, "bytes of state"), of(mixer, "accuracy")) for mixer in mixers]
    report = train.write_report(
        out,
        title="What mixers recall, and what they remember",
        summary=f"{num_pairs} pairs in {seq_len} of {vocab} tokens, {steps} steps of {batch_size} rows; of {len(rates)} learning "
        f"rates the best, of {num_seeds} seeds the mean",
        runs=folders,
        curves={},
        unit="accuracy",
        tables={"In the end": table},
        plots={"Accuracy": partial(train.draw_scatter, groups, unit="accuracy", x_label="bytes of state a row")},
    )
    for row in table:
        print(
            f"{row['mixer']:>24} {row['width']:>4}: {row['bytes of state']:>9,} bytes, {row['accuracy']:.3f} recalled"
        )
    print(f"the report lies in {report}")


if __name__ == "__main__":
    train.run_cli(main, presets=PRESETS)
