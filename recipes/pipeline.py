"""Pipeline schedules on one model and the same batches: equal losses, idle time, memory, communication, pictures.

    python recipes/pipeline.py                            # pipe 4 x data 2, of 8 devices the CPU emulates
    python recipes/pipeline.py --pipe 8 --layers 16 --microbatches 32 --runs 1f1b interleaved
    python recipes/pipeline.py --resume                   # after Ctrl-C; completed runs are read back

Emulated devices share a CPU: idle time is that of the timetable, whose unit is a forward pass of a stage and whose
backward passes take two.
"""

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

import zoo
from zoo import tools, train
from zoo.parallel import Schedule
from zoo.tools.draw import draw_schedule

import optax

RUNS = {
    "one-device": Schedule("1f1b"), "gpipe": Schedule("gpipe"), "1f1b": Schedule("1f1b"),
    "interleaved": Schedule("1f1b"), "residuals": Schedule("1f1b", keep="residuals"),
}  # fmt: skip
DRAWN = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved": "1f1b"}


def draw_schedules(rounds, **sizes):
    """Return pictures of all schedules, and a table of their costs, in forward passes of a stage."""
    plots, rows = {}, []
    for title, name in DRAWN.items():
        with contextlib.suppress(ValueError):  # rounds of micro-batches that the stages do not divide
            table = Schedule(name).table(**sizes, rounds=rounds if title == "Interleaved" else 1)
            plots[title] = tools.report.Picture.of(partial(draw_schedule, table))
            rows.append({"schedule": title, "forward passes of a stage": f"{table.cost():g}"})
    return plots, rows


def main(
    *,
    data: tuple[Path, ...] = (),
    runs: tuple[str, ...] = tuple(RUNS),
    vocab: int = 256,
    embed: int = 64,
    layers: int = 8,
    heads: int = 4,
    mlp_dim: int = 256,
    seq_len: int = 64,
    batch_size: int = 32,
    steps: int = 10,
    learning_rate: float = 3e-3,
    warmup_steps: int = 5,
    weight_decay: float = 0.1,
    save_every: int = 5,
    mesh_options: train.MeshOptions = train.MeshOptions(pipe=4, schedule="1f1b", rounds=2, microbatches=16),
    run_options: train.RunOptions = train.RunOptions(Path("runs/pipeline")),
) -> None:
    """Train by each schedule, compare.

    Args:
        data: Files and directories of text; by default this Python's standard library.
        runs: Schedules to run; interleaved takes --rounds, all others one round.
        vocab: 256 for bytes; more trains a byte-pair encoding on the text.
        embed: Width of the residual stream.
        layers: Number of blocks, a multiple of pipe x rounds.
        heads: Attention heads, embed / heads wide each.
        mlp_dim: Width of the gated MLP.
        seq_len: Tokens per sequence.
        batch_size: Sequences per step, over all devices and micro-batches.
        steps: Optimizer steps of each run.
        learning_rate: Peak learning rate, after linear warmup; cosine decay to a tenth.
        warmup_steps: Steps of linear warmup, at most half of all.
        weight_decay: AdamW's, of matrices and embeddings.
        save_every: Steps between checkpoints.
    """
    config, warmup_steps, microbatches = dict(locals()), min(warmup_steps, steps // 2), mesh_options.microbatches
    train.check_names("runs", runs, RUNS)
    if mesh_options.schedule != "1f1b" or mesh_options.pipe < 2 or min(steps, save_every) < 1:
        raise ValueError("pipe is at least 2, steps and save_every 1; schedules are chosen by runs")
    one_round = dataclasses.replace(mesh_options, rounds=1)
    meshes = {name: (mesh_options if name == "interleaved" else one_round).make_mesh() for name in runs}
    meshes |= {name: zoo.make_mesh(devices=jax.devices()[:1]) for name in runs if name == "one-device"}
    corpus, key = train.load_text(data, vocab=vocab), jax.random.key(run_options.seed)

    def make(key):
        sizes: dict[str, Any] = {"vocab": corpus.vocab, "embed": embed, "layers": layers, "mlp": mlp_dim}
        return mesh_options.apply(zoo.models.Transformer(**sizes, heads=heads, key=key))

    tables = {}
    for name, mesh in meshes.items():
        zoo.place(eqx.filter_eval_shape(make, key), mesh)  # sizes that do not fit raise now
        sizes = {"stages": mesh.shape["pipe"], "rounds": mesh.layout.rounds, "microbatches": microbatches}
        tables[name] = RUNS[name].table(**sizes)
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = mesh_options.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw))

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, mesh_options.dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        batch, mesh, order = inputs
        gradient = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches, schedule=order)
        loss, grads = gradient(model, batch, loss_scale=train.loss_scale(opt_state))
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss, optax.tree.norm(grads)

    rows, first, tokens = [], [], batch_size * seq_len
    for name, mesh in meshes.items():
        model, table = zoo.init(make, key, mesh), tables[name]
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(seq_len, batch_size, seed=run_options.seed, process=zoo.parallel.reader(mesh))
        kinds = {"tokens": "int32", "targets": "int32", "weights": "float32"}
        like = {name: jax.ShapeDtypeStruct((batch_size, seq_len), kind) for name, kind in kinds.items()}
        program = zoo.inspect.compiled(step, (zoo.place_batch(like, mesh), mesh, RUNS[name]), model, opt_state)
        with train.Run(run_options.subrun(name), config=config | {"run": name}) as run:
            run.print_line(f"{name}: {zoo.count(model):,} parameters on {mesh}; {corpus}\n{program}")
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, steps, tokens=tokens, flops=6 * tokens * zoo.count(model)):
                inputs = zoo.place_batch(batch, mesh, vocab=corpus.vocab), mesh, RUNS[name]
                model, opt_state, loss, norm = step(inputs, model, opt_state)
                run.log(
                    loss=loss, gradient_norm=norm, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1)
                )
                if run.due(save_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return
        losses = [line["loss"] for line in train.read_metrics(run.directory / "metrics.jsonl")]
        row: dict[str, Any] = {"run": name, "idle": f"{table.bubble:.1%}", "ticks": len(table.forward)}
        row |= {"inputs kept": table.num_slots, "temporaries": program.memory and program.memory.temporaries}
        over_pipe = [each for each in program.collectives if "pipe" in (each.axes or ())]
        for kind in ("collective-permute", "all-reduce"):
            row[f"{kind}s"] = sum(each.count for each in over_pipe if each.kind == kind)
        row |= {"bytes over pipe": sum(each.bytes for each in over_pipe), "loss": losses[-1]}
        rows.append(row | {"largest difference": f"{max(map(lambda a, b: abs(a - b), losses, first or losses)):.1e}"})
        first = first or losses
    about = f"{steps} steps, {microbatches} micro-batches; collectives over pipe and bytes are of one device and step"
    plots, costs = draw_schedules(mesh_options.rounds, stages=mesh_options.pipe, microbatches=microbatches)
    tools.report_runs(
        run_options.out,
        "Pipeline schedules",
        rows,
        description=about,
        curves={"loss": "loss"},
        unit="nats per token",
        tokens_per_step=tokens,
        plots=plots,
        tables={"Cost of a step": costs},
        recipe=main,
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # a CPU emulates eight; accelerators are as many as there are
    train.run_cli(main)
