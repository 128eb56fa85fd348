"""Find needles in long rows: a hybrid of recurrences and attention, its sequence sharded over eight devices.

    python recipes/long_context.py                        # 1,024 tokens over 8 emulated devices: all needles found
    python recipes/long_context.py --seq-len 32768 --eval-seq-lens 32768 --batch-size 1
    python recipes/long_context.py --resume               # after Ctrl-C: continue from the last checkpoint

A row hides pairs of a key and a value in filler, and its end asks for the values of some keys. Devices exchange states
of recurrences, whose size does not grow with the row, and keys of attention. After training on rows of 1,024 tokens, it
finds nine tenths of the needles in rows of 4,096, where chance is a sixteenth.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import zoo
from zoo import layers, tools, train
from zoo.parallel import Dim
from zoo.text.tasks.synthetic import NeedleRetrieval

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Config(train.TrainConfig):  # batch_size, steps, learning_rate, ..., mesh
    """Train on needle retrieval, evaluate by length and depth, count the bytes that cross devices."""

    # Names of mixers, repeated over the layers, which have no MLPs.
    pattern: tuple[str, ...] = ("delta-net", "attention")
    num_layers: int = 2  # Number of layers.
    vocab: int = 64  # Tokens: half of them filler, a quarter keys, a quarter values.
    embed: int = 32  # Width of the residual stream.
    heads: int = 1  # Heads of a mixer.
    seq_len: int = 1024  # Tokens per row of training.
    eval_seq_lens: tuple[int, ...] = (512, 1024, 4096)  # Tokens per row and document of each evaluation.
    # Tokens of the shortest documents that rows of training pack: short ones are learned first.
    min_seq_len: int = 32
    num_pairs: int = 4  # Needles per document.
    num_queries: int = 8  # Queries at the end of a document.
    eval_rows: int = 16  # Held-out rows of each length.
    batch_size: int = 8
    steps: int = 200
    learning_rate: float = 1e-2
    warmup_steps: int = 20
    mesh: train.MeshOptions = train.MeshOptions(context=8)
    run: train.RunOptions = train.RunOptions(Path("runs/long_context"))


def mixer_factories(embed, heads):
    """Mixers by name. Attention needs no positions: recurrences before it bring a key to its value's position."""
    norm = partial(layers.RMSNorm, embed // heads, features=Dim("head_dim"))
    return {
        "attention": partial(layers.Attention, heads=heads, qk_norm=norm),
        "delta-net": partial(layers.DeltaNet, heads=heads),
        "gated-delta-net": partial(layers.GatedDeltaNet, heads=heads),
        "gated-linear-attention": partial(layers.GatedLinearAttention, heads=heads),
        "hgrn2": partial(layers.HGRN2, heads=heads),
        "rg-lru": partial(layers.RGLRU, heads=heads),
    }


def make_model(config, key):
    mixers = mixer_factories(config.embed, config.heads)
    sizes = {"vocab": config.vocab, "embed": config.embed, "layers": config.num_layers}
    pattern = [mixers[name] for name in config.pattern]
    return config.mesh.apply(zoo.models.Hybrid(**sizes, pattern=pattern, tied=False, key=key))


def main(config: Config) -> None:
    train.check_names("mixers", config.pattern, mixer_factories(config.embed, config.heads))
    mesh = config.mesh.make_mesh()
    seed = config.run.seed

    needles = partial(NeedleRetrieval, config.vocab, num_pairs=config.num_pairs, num_queries=config.num_queries)
    rows = needles(config.seq_len, min_seq_len=config.min_seq_len, seed=2 * seed)
    batches = train.ShuffledBatches(rows, config.batch_size, seed=seed, mesh=mesh)
    unseen = {length: needles(length, seed=2 * seed + 1) for length in config.eval_seq_lens}
    tests = {length: train.stack_rows(rows, config.eval_rows) for length, rows in unseen.items()}

    model = zoo.init(partial(make_model, config), jax.random.key(seed), mesh)
    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)

    @partial(zoo.spmd, mesh=mesh, out="batch seq vocab")
    def predict(model, tokens):
        return zoo.cast(model, config.mesh.dtype)(tokens)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config, name="hybrid", mesh=mesh, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps):
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                found = [recall(config, predict, model, mesh, test) for test in tests.values()]
                run.log(accuracy=np.array([accuracy for accuracy, _ in found]))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)
    if run.stopped:
        return

    report(config, mesh, {length: recall(config, predict, model, mesh, test) for length, test in tests.items()})


def report(config, mesh, found):
    """Write report.html: accuracy by length and depth, and the bytes that a device sends in each kind of layer."""
    rows = []
    curves = []
    for length, (accuracy, by_depth) in found.items():
        depths = {f"depth {low:.0%}": found for low, found in zip(DEPTHS[:-1], by_depth, strict=True)}
        sent = {f"bytes, {name}": count_bytes(config, name, length, mesh) for name in dict.fromkeys(config.pattern)}
        rows.append({"run": "hybrid", "tokens": length, "retrieved": accuracy, **depths, **sent})
        curves.append(tools.report.Curve(f"{length:,} tokens", [int(100 * low) for low in DEPTHS[:-1]], by_depth))
    chart = tools.report.LineChart(curves, "accuracy", "depth in percent", baselines={"chance": 4 / config.vocab})
    tools.report_runs(
        config,
        "Needles in a long context",
        rows,
        description=f"{config.num_pairs} needles on {mesh}; bytes that a device sends in a layer's forward pass",
        curves={"loss": "training"},
        unit="nats per query",
        plots={"Retrieval by depth": chart},
    )


def recall(config, predict, model, mesh, test):
    """Return the accuracy of all queries, and by the depth of their needles."""
    index, count = zoo.parallel.reader(mesh)
    tokens = np.asarray(test["tokens"])
    guesses = predict(model, zoo.place_batch(np.split(tokens, count)[index], mesh)).argmax(-1)
    guesses = multihost_utils.process_allgather(guesses, tiled=True)
    correct = (guesses == np.asarray(test["targets"]))[:, 1 - 2 * config.num_queries :: 2]
    depths = NeedleRetrieval.measure_depths(tokens, config.num_queries)
    by_depth = [float(correct[(depths >= low) & (depths < high)].mean()) for low, high in pairwise(DEPTHS)]
    return float(correct.mean()), by_depth


def count_bytes(config, name, seq_len, mesh):
    """Count the bytes that a device sends along `context` in one mixer's forward pass, from the compiled program."""

    def mix(layer, x):
        return layer(x, layers.TokenInfo())[0]

    make = partial(mixer_factories(config.embed, config.heads)[name], config.embed)
    layer = zoo.place(eqx.filter_eval_shape(make, key=jax.random.key(0)), mesh)
    x = zoo.place_batch(jax.ShapeDtypeStruct((config.batch_size, seq_len, config.embed), "float32"), mesh)
    program = zoo.inspect.compiled(zoo.spmd(mix, mesh, out="batch seq embed"), layer, x)
    return sum(row.bytes for row in program.collectives if "context" in (row.axes or ()))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    train.run_cli(main, Config)
