"""Pipeline schedules on one model and the same batches: equal losses, idle time, memory, communication, pictures.

    python recipes/pipeline.py                            # pipe 4 x data 2, of 8 devices the CPU emulates
    python recipes/pipeline.py --pipe 8 --layers 16 --microbatches 32 --runs 1f1b interleaved
    python recipes/pipeline.py --resume                   # after Ctrl-C; completed runs are read back

Emulated devices share a CPU: idle time is read from the timetable, whose unit is a forward pass of a stage and whose
backward passes take two.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
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


@dataclass(frozen=True)
class Config(train.ModelConfig):  # batch_size, steps, learning_rate, ..., data, seq_len, vocab, embed, ...
    """Train by each schedule, compare."""

    runs: tuple[str, ...] = tuple(RUNS)  # Schedules to run; interleaved takes --rounds, all others one round.
    layers: int = 8  # Number of blocks, a multiple of pipe x rounds.
    heads: int = 4
    seq_len: int = 64
    batch_size: int = 32
    steps: int = 10
    warmup_steps: int = 5
    eval_every: int = 5
    """Steps between checkpoints."""
    mesh: train.MeshOptions = train.MeshOptions(pipe=4, schedule="1f1b", rounds=2, microbatches=16)
    run: train.RunOptions = train.RunOptions(Path("runs/pipeline"))


def make_mesh(config, name):
    """Return the mesh of a run: one device, or the mesh of the flags, which only "interleaved" gives several rounds."""
    if name == "one-device":
        return zoo.make_mesh(devices=jax.devices()[:1])
    if name == "interleaved":
        return config.mesh.make_mesh()
    return replace(config.mesh, rounds=1).make_mesh()


def make_model(config, vocab, key):
    sizes = {"vocab": vocab, "embed": config.embed, "layers": config.layers, "heads": config.heads}
    return config.mesh.apply(zoo.models.Transformer(**sizes, mlp=config.mlp_dim, key=key))


def train_by(order, mesh, name, config, corpus):
    """Train the model by a schedule, in a run of its own; return the run and the compiled step."""
    model = zoo.init(partial(make_model, config, corpus.vocab), jax.random.key(config.run.seed), mesh)
    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, microbatches=config.mesh.microbatches, schedule=order)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    program = zoo.inspect.compiled(step, config.make_abstract_batch(mesh), model, opt_state)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)
    with train.Run(config, name=name, mesh=mesh, data=corpus, model=model) as run:
        run.print_line(str(program))
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps):
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)
    return run, program


def main(config: Config) -> None:
    train.check_names("runs", config.runs, RUNS)
    if config.mesh.schedule != "1f1b" or config.mesh.pipe < 2:
        raise ValueError("pipe is at least 2, and schedules are chosen by runs")
    meshes = {name: make_mesh(config, name) for name in config.runs}
    corpus = train.load_text(config.data, vocab=config.vocab)
    tables = {}
    for name, mesh in meshes.items():
        zoo.place(eqx.filter_eval_shape(make_model, config, corpus.vocab, jax.random.key(0)), mesh)  # or raises now
        sizes = {"stages": mesh.shape["pipe"], "microbatches": config.mesh.microbatches}
        tables[name] = RUNS[name].table(**sizes, rounds=mesh.layout.rounds)

    rows = []
    losses = {}
    for name, mesh in meshes.items():
        run, program = train_by(RUNS[name], mesh, name, config, corpus)
        if run.stopped:
            return
        losses[name] = np.array([line["loss"] for line in train.read_metrics(run.directory / "metrics.jsonl")])
        sent = [each for each in program.collectives if "pipe" in (each.axes or ())]
        row = {
            "run": name,
            "idle": f"{tables[name].bubble:.1%}",
            "ticks": len(tables[name].forward),
            "inputs kept": tables[name].num_slots,
            "temporaries": program.memory and program.memory.temporaries,
            "collective-permutes": sum(each.count for each in sent if each.kind == "collective-permute"),
            "all-reduces": sum(each.count for each in sent if each.kind == "all-reduce"),
            "bytes over pipe": sum(each.bytes for each in sent),
            "forward passes of a stage": f"{tables[name].cost():g}",
            "exposed seconds": program.exposed_seconds or "not known",
            "loss": losses[name][-1],
            "largest difference": f"{np.abs(losses[name] - losses[config.runs[0]]).max():.1e}",
        }
        rows.append(row)

    tools.report_runs(
        config,
        "Pipeline schedules",
        rows,
        description=(
            f"{config.steps} steps, {config.mesh.microbatches} micro-batches; collectives over pipe and bytes are of "
            "one device and step"
        ),
        curves={"loss": "loss"},
        unit="nats per token",
        tokens_per_step=config.batch_size * config.seq_len,
        plots={name: tools.report.Picture(partial(draw_schedule, table)) for name, table in tables.items()},
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # a CPU emulates eight; accelerators are as many as there are
    train.run_cli(main, Config)
