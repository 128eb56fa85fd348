"""Compare mixers by the state they track: DeltaNet that may flip signs carries parity to 16 times the training length.

    python recipes/state_tracking.py                      # parity and S3, a quarter of an hour on two shared cores
    python recipes/state_tracking.py --groups s5 --embed 64 --steps 5000 --mixers delta-product delta-product-negative
    python recipes/state_tracking.py --resume             # after Ctrl-C: what is complete is read back

The word problem (Merrill et al., arXiv:2404.08819, section 3): a token is an element of a group, and the model says at
each what the product of all so far is. Parity is that of the group of two. What has to be carried along is one of a
few elements, however long the row: a mixer that carries it goes on beyond the lengths that it was trained on, one that
found another way does not. A linear recurrence whose transitions have no negative eigenvalue cannot carry parity
(Grazzi et al., arXiv:2411.12537, theorem 1): delta rules are tried with and without.

Beyond the 8 tokens of training, up to 128, the best of eight runs has 1.00 of parity with DeltaNet and negative
eigenvalues, and 0.93 of S3 with DeltaProduct and them; all without them are at chance. docs/state_tracking.md has the
other figures, and what they do not say.
"""

import itertools
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from zoo import train  # isort: skip  (before optax: it says which command installs what is missing)
import optax

import zoo
from zoo.layers import Attention, DeltaNet, GatedDeltaProduct, Mamba, Mamba2, RMSNorm
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim


def rotary_attention(embed, heads, **options):
    """With norms of queries and keys, as delta rules have them."""
    size = embed // heads
    norm = partial(RMSNorm, size, features=Dim("head_dim"))
    return Attention(embed, heads, rotary=Rotary(size), qk_norm=norm, **options)


def mamba(embed, heads, **options):
    """Each of its channels is a head of its own."""
    return Mamba(embed, conv_width=1, **options)


def mamba2(embed, heads, **options):
    """With heads of twice the width, as the paper has them, and a memory that is as deep as delta rules' is."""
    return Mamba2(embed, heads, head_dim=2 * embed // heads, state_dim=embed // heads, conv_width=1, **options)


# Each is called with the width and heads=. Convolutions are one token wide, that is none: they look back a few tokens,
# which is enough for the first of a row, and that is what models then learn in place of a state.
MIXERS = {
    "attention": rotary_attention,
    "mamba": mamba,
    "mamba2": mamba2,
    "delta-net": partial(DeltaNet, conv_width=1),
    "delta-net-negative": partial(DeltaNet, conv_width=1, negative_eigenvalues=True),
    "delta-product": partial(GatedDeltaProduct, conv_width=1, negative_eigenvalues=False),
    "delta-product-negative": partial(GatedDeltaProduct, conv_width=1, negative_eigenvalues=True),
}


def parity_of(permutation):
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2


GROUPS = {  # permutations, the identity first
    "parity": list(itertools.permutations(range(2))),
    "s3": list(itertools.permutations(range(3))),
    "a4": [each for each in itertools.permutations(range(4)) if parity_of(each) == 0],
    "s5": list(itertools.permutations(range(5))),
}


class Words:
    """Rows by number: elements of a group, and the product of all so far, the newest applied last."""

    def __init__(self, group: str, seq: int, *, seed: int, rows: int = 100_000):
        elements = GROUPS[group]
        number = {element: i for i, element in enumerate(elements)}
        # after[p, q]: first p, then q
        self.after = np.array([[number[tuple(q[i] for i in p)] for q in elements] for p in elements])
        self.seq, self.seed, self.rows = seq, seed, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        tokens = np.random.default_rng((self.seed, index)).integers(0, len(self.after), size=self.seq)
        targets = np.zeros(self.seq, np.int32)
        product = 0
        for place, token in enumerate(tokens):
            targets[place] = product = self.after[product, token]
        return {"tokens": tokens.astype(np.int32), "targets": targets}


def held_out(words, rows):
    """The first rows, one below the other."""
    made = [words[index] for index in range(rows)]
    return {part: jnp.stack([row[part] for row in made]) for part in made[0]}


def main(
    *,
    groups: tuple[str, ...] = ("parity", "s3"),
    mixers: tuple[str, ...] = tuple(MIXERS),
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
    seed: int = 0,
    out: Path = Path("runs/state_tracking"),
    resume: bool = False,
    profile: bool = False,
) -> None:
    """Train each mixer on each group, all learning rates and seeds at once; measure beyond; compare.

    Args:
        groups: parity, s3, a4 (the even permutations of four), s5.
        mixers: Which ones.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Of each mixer, embed / heads wide.
        mlp_dim: Width of the SwiGLU after each mixer; a mixer is the whole block unless given.
        seq_len: Tokens in a row of training.
        eval_seq_len: Tokens in a row that is measured on.
        batch_size: Rows in a step.
        steps: Optimizer steps of each run.
        rates: Peaks of the learning rate, after warm-up; each falls to zero as a cosine does.
        num_seeds: How many initial parameters each rate is tried with.
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
    for kind, chosen, known in (("groups", groups, GROUPS), ("mixers", mixers, MIXERS)):
        if not chosen or set(chosen) - known.keys():
            raise ValueError(f"name one or more of the {kind} {', '.join(known)}, not {', '.join(chosen) or 'none'}")
    if min(steps, num_seeds, eval_rows, batch_size, seq_len) < 1 or eval_seq_len <= seq_len:
        raise ValueError(
            f"{steps=}, {num_seeds=}, {eval_rows=}, {batch_size=} and {seq_len=} are at least 1, and {eval_seq_len=} is more than that"
        )
    learning_rates, keys = train.sweep_grid(rates, seeds=range(seed, seed + num_seeds))

    def make(group, mixer, key):
        vocab, pattern = len(GROUPS[group]), (partial(MIXERS[mixer], heads=heads),)
        return zoo.models.Hybrid(
            vocab=vocab, embed=embed, layers=layers, pattern=pattern, mlp=mlp_dim, tied=False, key=key
        )

    # A rate multiplies the updates, whose own peak is 1: a number like any other, so that one program serves all rates.
    # It runs on one device, without a mesh: models this small leave nothing to share out.
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, min(warmup_steps, steps // 2), steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    step = train.sweep_step(zoo.cross_entropy, optimizer)

    @train.sweep_map
    def accuracy(model, batch):
        """At each place, over rows."""
        return (model(batch["tokens"]).argmax(-1) == batch["targets"]).mean(0)

    table, folders, curves = [], {}, {group: [] for group in groups}
    tests = {group: held_out(Words(group, eval_seq_len, seed=2 * seed + 1), eval_rows) for group in groups}
    for group, mixer in itertools.product(groups, mixers):
        name, test = f"{group}-{mixer}", tests[group]
        batches = train.ShuffledBatches(Words(group, seq_len, seed=2 * seed), batch_size, seed=seed)
        models = train.sweep_models(partial(make, group, mixer), keys)
        opt_states = train.sweep_map(lambda model: optimizer.init(zoo.trainable(model)))(models)
        with train.Run(out / name, config=config | {"run": name}, resume=resume, profile=profile) as run:
            run.print_line(f"{name}: {len(rates)} learning rates, {num_seeds} seeds")
            models, opt_states = run.restore((models, opt_states), batches)
            for inputs in run.steps(batches, steps, tokens=batch_size * seq_len * len(keys)):
                models, opt_states, losses = step(inputs, models, opt_states, learning_rates)
                run.log(losses=losses)
                if run.every(eval_every):
                    places = accuracy(models, test)
                    beyond = places[:, seq_len:].mean(1)
                    run.log(places=places, trained=places[beyond.argmax(), :seq_len].mean(), beyond=beyond.max())
                if run.due(eval_every):
                    run.save((models, opt_states), batches)
        batches.close()
        if run.stopped:
            return
        folders[name] = out / name
        # Chosen by what is measured: the best of all rates and seeds, since the question is what can be learnt.
        places = np.array(train.read_metrics(folders[name] / "metrics.jsonl")[-1]["places"])
        beyond = places[:, seq_len:].mean(1)
        table.append({
            "group": group,
            "mixer": mixer,
            f"up to {seq_len} tokens": places[beyond.argmax(), :seq_len].mean(),
            f"{seq_len} to {eval_seq_len}": beyond.max(),
            "median run": np.median(beyond),
            "best rate": rates[beyond.argmax() // num_seeds],
        })  # fmt: skip
        bins = np.array_split(np.arange(eval_seq_len), 32)
        values = [places[beyond.argmax(), place].mean() for place in bins]
        curves[group].append(train.Curve(mixer, [int(place[-1]) + 1 for place in bins], values))

    report = train.write_report(
        out,
        title="The state that mixers track",
        summary=f"Trained on {seq_len} tokens, measured on {eval_seq_len}; {steps} steps of {batch_size} rows, the best run of "
        f"{len(rates)} learning rates with {num_seeds} seeds each",
        runs=folders,
        curves={},
        unit="accuracy",
        tables={"In the end": table},
        plots={
            f"Accuracy by place: {group}": partial(
                train.draw_line_chart,
                curves[group],
                {"chance": 1 / len(GROUPS[group])},
                unit="accuracy",
                x_label="tokens",
            )
            for group in groups
        },
    )
    for row in table:
        trained, beyond = row[f"up to {seq_len} tokens"], row[f"{seq_len} to {eval_seq_len}"]
        print(
            f"{row['group']:>8} {row['mixer']:>24}: {trained:.3f} up to {seq_len} tokens, {beyond:.3f} up to {eval_seq_len}"
        )
    print(f"the report lies in {report}")


if __name__ == "__main__":
    train.run_cli(main)
