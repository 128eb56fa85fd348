"""Pipeline schedules on one model and the same batches: equal losses, idle time, memory, communication, pictures.

    python recipes/pipeline.py                            # pipe 4 x data 2, of 8 devices the CPU emulates
    python recipes/pipeline.py --pipe 8 --layers 16 --microbatches 32 --runs 1f1b interleaved
    python recipes/pipeline.py --resume                   # after Ctrl-C; completed runs are read back

Emulated devices share a CPU: idle time is read from the timetable, whose unit is a forward pass of a stage and whose
backward passes take two.
"""

import contextlib
import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import optax

import zoo
from zoo import tools, train
from zoo.parallel import Schedule
from zoo.tools.draw import draw_schedule

RUNS = {
    "one-device": Schedule("1f1b"),
    "gpipe": Schedule("gpipe"),
    "1f1b": Schedule("1f1b"),
    "interleaved": Schedule("1f1b"),
    "residuals": Schedule("1f1b", keep="residuals"),
}
DRAWN = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved": "1f1b"}


@dataclass(frozen=True)
class Config:
    """Train by each schedule, compare."""

    data: tuple[Path, ...] = ()  # Files and directories of text; by default this Python's standard library.
    runs: tuple[str, ...] = tuple(RUNS)  # Schedules to run; interleaved takes --rounds, all others one round.
    vocab: int = 256  # 256 for bytes; more trains a byte-pair encoding on the text.
    embed: int = 64  # Width of the residual stream.
    layers: int = 8  # Number of blocks, a multiple of pipe x rounds.
    heads: int = 4  # Attention heads, embed / heads wide each.
    mlp_dim: int = 256  # Width of the gated MLP.
    seq_len: int = 64  # Tokens per sequence.
    batch_size: int = 32  # Sequences per step, over all devices and micro-batches.
    steps: int = 10  # Optimizer steps of each run.
    learning_rate: float = 3e-3  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 5  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.1  # AdamW's, of matrices and embeddings.
    save_every: int = 5  # Steps between checkpoints.
    mesh: train.MeshOptions = train.MeshOptions(pipe=4, schedule="1f1b", rounds=2, microbatches=16)
    run: train.RunOptions = train.RunOptions(Path("runs/pipeline"))


def main(config: Config) -> None:
    train.check_names("runs", config.runs, RUNS)
    if config.mesh.schedule != "1f1b" or config.mesh.pipe < 2 or min(config.steps, config.save_every) < 1:
        raise ValueError("pipe is at least 2, steps and save_every 1; schedules are chosen by runs")
    meshes = {name: make_mesh(config, name) for name in config.runs}
    key = jax.random.key(config.run.seed)
    corpus = train.load_text(config.data, vocab=config.vocab)

    def make_model(key):
        model = zoo.models.Transformer(
            vocab=corpus.vocab,
            embed=config.embed,
            layers=config.layers,
            heads=config.heads,
            mlp=config.mlp_dim,
            key=key,
        )
        return config.mesh.apply(model)

    tables = {}
    for name, mesh in meshes.items():
        zoo.place(eqx.filter_eval_shape(make_model, key), mesh)  # sizes that do not fit raise now
        stages = mesh.shape["pipe"]
        tables[name] = RUNS[name].table(stages=stages, rounds=mesh.layout.rounds, microbatches=config.mesh.microbatches)

    peak = config.learning_rate
    warmup = min(config.warmup_steps, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    def make_step(mesh, order):
        gradient = zoo.value_and_grad(loss_fn, mesh, microbatches=config.mesh.microbatches, schedule=order)

        @eqx.filter_jit(donate="all-except-first")
        def step(batch, model, opt_state):
            loss, grads = gradient(model, batch)
            updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
            model = zoo.place(eqx.apply_updates(model, updates), mesh)
            return model, opt_state, loss, optax.tree.norm(grads)

        return step

    tokens = config.batch_size * config.seq_len
    rows = []
    first_losses = None
    for name, mesh in meshes.items():
        step = make_step(mesh, RUNS[name])
        model = zoo.init(make_model, key, mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        program = zoo.inspect.compiled(step, abstract_batch(config, mesh), model, opt_state)

        reader = zoo.parallel.reader(mesh)
        batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, process=reader)
        flops = 6 * tokens * zoo.count(model)
        with train.Run(config.run, config=config, name=name) as run:
            run.print_line(f"{name}: {zoo.count(model):,} parameters on {mesh}; {corpus}\n{program}")
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, config.steps, tokens=tokens, flops=flops):
                batch = zoo.place_batch(batch, mesh, vocab=corpus.vocab)
                model, opt_state, loss, norm = step(batch, model, opt_state)
                run.log(loss=loss, gradient_norm=norm, learning_rate=schedule(run.step - 1))
                if run.due(config.save_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return

        losses = [line["loss"] for line in train.read_metrics(run.directory / "metrics.jsonl")]
        if first_losses is None:
            first_losses = losses
        table = tables[name]
        over_pipe = [each for each in program.collectives if "pipe" in (each.axes or ())]
        row = {
            "run": name,
            "idle": f"{table.bubble:.1%}",
            "ticks": len(table.forward),
            "inputs kept": table.num_slots,
            "temporaries": program.memory and program.memory.temporaries,
            "collective-permutes": count_collectives(over_pipe, "collective-permute"),
            "all-reduces": count_collectives(over_pipe, "all-reduce"),
            "bytes over pipe": sum(each.bytes for each in over_pipe),
            "loss": losses[-1],
            "largest difference": f"{largest_difference(losses, first_losses):.1e}",
        }
        if program.exposed_seconds is not None:
            row["exposed seconds"] = program.exposed_seconds
        rows.append(row)

    plots, costs = draw_schedules(config.mesh.rounds, stages=config.mesh.pipe, microbatches=config.mesh.microbatches)
    tools.report_runs(
        config.run.out,
        "Pipeline schedules",
        rows,
        config=config,
        description=(
            f"{config.steps} steps, {config.mesh.microbatches} micro-batches; collectives over pipe and bytes are of "
            "one device and step"
        ),
        curves={"loss": "loss"},
        unit="nats per token",
        tokens_per_step=tokens,
        plots=plots,
        tables={"Cost of a step": costs},
    )


def make_mesh(config, name):
    """Return the mesh of a run: one device, or the mesh of the flags, which only "interleaved" gives several rounds."""
    if name == "one-device":
        return zoo.make_mesh(devices=jax.devices()[:1])
    if name == "interleaved":
        return config.mesh.make_mesh()
    return dataclasses.replace(config.mesh, rounds=1).make_mesh()


def abstract_batch(config, mesh):
    """Return a batch without numbers, to compile the step for."""
    shape = (config.batch_size, config.seq_len)
    dtypes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    return zoo.place_batch({name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}, mesh)


def count_collectives(collectives, kind):
    return sum(each.count for each in collectives if each.kind == kind)


def largest_difference(losses, others):
    return max(abs(loss - other) for loss, other in zip(losses, others, strict=True))


def draw_schedules(rounds, **sizes):
    """Return pictures of all schedules, and a table of their costs, in forward passes of a stage."""
    plots = {}
    rows = []
    for title, name in DRAWN.items():
        with contextlib.suppress(ValueError):  # rounds of micro-batches that the stages do not divide
            table = Schedule(name).table(**sizes, rounds=rounds if title == "Interleaved" else 1)
            plots[title] = tools.report.Picture(partial(draw_schedule, table))
            rows.append({"schedule": title, "forward passes of a stage": f"{table.cost():g}"})
    return plots, rows


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # a CPU emulates eight; accelerators are as many as there are
    train.run_cli(main, Config)
