"""Find needles in long rows: a hybrid of recurrences and attention, its sequence sharded over eight devices.

    python recipes/long_context.py                        # 1,024 tokens over 8 emulated devices: all needles found
    python recipes/long_context.py --seq-len 32768 --eval-seq-lens 32768 --batch-size 1
    python recipes/long_context.py --resume               # after Ctrl-C: continue from the last checkpoint

A row hides pairs of a key and a value in filler, and its end asks for the values of some keys. Devices exchange states
of recurrences, whose size does not grow with the row, and keys of attention. After training on rows of 1,024 tokens, it
finds nine tenths of the needles in rows of 4,096, where chance is a sixteenth.
"""

from functools import partial
from itertools import pairwise
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils

import zoo
from zoo import layers, tools, train
from zoo.parallel import Dim

import optax

MIXERS = {
    "attention": layers.Attention, "delta-net": layers.DeltaNet, "gated-delta-net": layers.GatedDeltaNet,
    "gated-linear-attention": layers.GatedLinearAttention, "hgrn2": layers.HGRN2, "rg-lru": layers.RGLRU,
}  # fmt: skip
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def mixer_factories(embed, heads):
    """Mixers by name. Attention needs no positions: recurrences before it bring a key to its value's position."""
    norm = partial(layers.RMSNorm, embed // heads, features=Dim("head_dim"))
    options = {"attention": {"qk_norm": norm}}
    return {name: partial(mixer, heads=heads, **options.get(name, {})) for name, mixer in MIXERS.items()}


def count_bytes(mixer, embed, batch_size, seq_len, mesh):
    """Bytes that a device sends along `context` in one mixer's forward pass, read from the compiled program."""
    layer = zoo.place(eqx.filter_eval_shape(partial(mixer, embed), key=jax.random.key(0)), mesh)
    x = zoo.place_batch(jax.ShapeDtypeStruct((batch_size, seq_len, embed), "float32"), mesh)
    mix = zoo.spmd(lambda layer, x: layer(x, layers.TokenInfo())[0], mesh, out="batch seq embed")
    return sum(row.bytes for row in zoo.inspect.compiled(mix, layer, x).collectives if "context" in (row.axes or ()))


def main(
    *,
    pattern: tuple[str, ...] = ("delta-net", "attention"),
    num_layers: int = 2,
    vocab: int = 64,
    embed: int = 32,
    heads: int = 1,
    seq_len: int = 1024,
    eval_seq_lens: tuple[int, ...] = (512, 1024, 4096),
    min_seq_len: int = 32,
    num_pairs: int = 4,
    num_queries: int = 8,
    batch_size: int = 8,
    steps: int = 200,
    learning_rate: float = 1e-2,
    warmup_steps: int = 20,
    eval_rows: int = 16,
    eval_every: int = 100,
    mesh_options: train.MeshOptions = train.MeshOptions(context=8),
    run_options: train.RunOptions = train.RunOptions(Path("runs/long_context")),
) -> None:
    """Train on needle retrieval, evaluate by length and depth, count the bytes that cross devices.

    Args:
        pattern: Names of mixers, repeated over the layers, which have no MLPs.
        num_layers: Number of layers.
        vocab: Tokens: half of them filler, a quarter keys, a quarter values.
        embed: Width of the residual stream.
        heads: Heads of a mixer.
        seq_len: Tokens per row of training.
        min_seq_len: Tokens of the shortest documents that rows of training pack: short ones are learned first.
        eval_seq_lens: Tokens per row and document of each evaluation.
        num_pairs: Needles per document.
        num_queries: Queries at the end of a document.
        batch_size: Rows per step, over all devices.
        steps: Optimizer steps.
        learning_rate: Peak learning rate, after linear warmup; cosine decay to a tenth.
        warmup_steps: Steps of linear warmup, at most half of all.
        eval_rows: Held-out rows of each length.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, mesh, seed = dict(locals()), mesh_options.make_mesh(), run_options.seed
    train.check_names("mixers", pattern, MIXERS)
    needles = partial(train.NeedleRetrieval, vocab, num_pairs=num_pairs, num_queries=num_queries)
    tests = {length: train.stack_rows(needles(length, seed=2 * seed + 1), eval_rows) for length in eval_seq_lens}
    index, count = reader = zoo.parallel.reader(mesh)
    rows = needles(seq_len, min_seq_len=min_seq_len, seed=2 * seed)
    batches = train.ShuffledBatches(rows, batch_size, seed=seed, process=reader)
    mixers, kinds = mixer_factories(embed, heads), dict.fromkeys(pattern)
    options = {"vocab": vocab, "embed": embed, "layers": num_layers, "pattern": [mixers[name] for name in pattern]}
    make = lambda key: mesh_options.apply(zoo.models.Hybrid(**options, tied=False, key=key))
    model, warmup_steps = zoo.init(make, jax.random.key(seed), mesh), min(warmup_steps, steps // 2)
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=train.decay_mask)
    optimizer = mesh_options.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw))
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
    predict = zoo.spmd(lambda model, tokens: zoo.cast(model, mesh_options.dtype)(tokens), mesh, out="batch seq vocab")

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, mesh_options.dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        scale = train.loss_scale(opt_state)
        loss, grads = zoo.value_and_grad(loss_fn, mesh, **mesh_options.accumulation)(model, batch, loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss, optax.tree.norm(grads)

    def recall(model, test):
        """Accuracy of all queries, and by the depth of their needles."""
        own = np.split(np.asarray(test["tokens"]), count)[index]
        guesses = multihost_utils.process_allgather(predict(model, zoo.place_batch(own, mesh)).argmax(-1), tiled=True)
        correct = (guesses == np.asarray(test["targets"]))[:, 1 - 2 * num_queries :: 2]
        depths = train.NeedleRetrieval.measure_depths(np.asarray(test["tokens"]), num_queries)
        by_depth = [float(correct[(depths >= low) & (depths < high)].mean()) for low, high in pairwise(DEPTHS)]
        return {"accuracy": float(correct.mean()), "by_depth": by_depth}

    with train.Run(run_options.subrun("hybrid"), config=config) as run:
        run.print_line(f"{zoo.count(model):,} parameters on {mesh}")
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, steps, tokens=batch_size * seq_len):
            model, opt_state, loss, norm = step(zoo.place_batch(batch, mesh, vocab=vocab), model, opt_state)
            run.log(loss=loss, gradient_norm=norm, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1))
            if run.every(eval_every):
                run.log(accuracy=np.array([recall(model, test)["accuracy"] for test in tests.values()]))
            if run.due(eval_every):
                run.save((model, opt_state), batches)
    if run.stopped:
        return
    rows, found = [], {length: recall(model, test) for length, test in tests.items()}
    for length, recalled in found.items():
        row = {"run": "hybrid", "tokens": length, "retrieved": recalled["accuracy"]}
        row |= {f"depth {low:.0%}": value for low, value in zip(DEPTHS[:-1], recalled["by_depth"], strict=True)}
        row |= {f"bytes, {name}": count_bytes(mixers[name], embed, batch_size, length, mesh) for name in kinds}
        rows.append(row)
    depths = [int(100 * x) for x in DEPTHS[:-1]]
    curves = [tools.report.Curve(f"{n:,} tokens", depths, found[n]["by_depth"]) for n in found]
    chart = tools.report.LineChart(curves, "accuracy", "depth in percent", baselines={"chance": 4 / vocab})
    tools.report_runs(
        run_options.out,
        "Needles in a long context",
        rows,
        description=f"{num_pairs} needles on {mesh}; bytes that a device sends in a layer's forward pass",
        curves={"loss": "training"},
        unit="nats per query",
        plots={"Retrieval by depth": chart},
        recipe=main,
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    train.run_cli(main)
