"""DiLoCo: workers train for H steps on their own, then average; 1/32 of the bytes for 0.10 bits per byte more.

    python recipes/diloco.py                              # H = 8, 32 and 128, and synchronous: 2 minutes on one core
    python recipes/diloco.py --periods 16 512 --workers 8 --steps 2048
    python recipes/diloco.py --start Qwen/Qwen3-0.6B --data ~/books --seq-len 2048 --periods 500 --steps 5000
    python recipes/diloco.py --resume                     # after Ctrl-C, between two outer steps too

Every worker has a replica of the parameters θ and an AdamW of its own, and takes H inner steps on its own rows without
communication. Then the replicas θ_k are averaged, and an outer optimizer, SGD with Nesterov momentum, moves θ with
θ - mean_k θ_k as its gradient (arXiv:2311.08105, algorithm 1). All workers go on from the new θ.

All runs start from one model that was trained synchronously, and read the same rows: DiLoCo ends at 2.53 bits per byte
with H = 32, synchronous data parallelism at 2.42, the means of two seeds. docs/diloco.md has the results.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import zoo
from zoo import tools, train


@dataclass(frozen=True)
class Config(train.ModelConfig):  # batch_size, steps, learning_rate, ..., mesh, data, seq_len, vocab, embed, ...
    """Train synchronously a while, then go on: synchronously, and with each number of inner steps; compare."""

    workers: int = 4  # Replicas, with batch_size / workers rows each: a multiple of the devices of the data axis.
    periods: tuple[int, ...] = (8, 32, 128)  # Inner steps between two outer steps (H), a run for each.
    outer_rate: float = 0.7  # Learning rate of the outer optimizer.
    outer_momentum: float = 0.9  # Its Nesterov momentum.
    # Model to start from: a Hugging Face directory, or a name on the hub, NAME[@REVISION]; by default one is trained.
    start: Path | None = None
    pretrain_steps: int = 128  # Synchronous steps of the model that all runs start from.
    mlp_dim: int = 128
    seq_len: int = 64
    steps: int = 512
    eval_every: int = 64
    mesh: train.MeshOptions = train.MeshOptions(remat="none")
    run: train.RunOptions = train.RunOptions(Path("runs/diloco"))


def make_model(config, vocab, key):
    sizes = {"vocab": vocab, "embed": config.embed, "layers": config.layers, "heads": config.heads}
    return config.mesh.apply(zoo.models.Transformer(**sizes, mlp=config.mlp_dim, qk_norm=True, key=key))


class Workers(zoo.parallel.Module):
    """Replicas of a model, one per worker: every array has a leading dim "workers"."""

    replicas: Any = zoo.parallel.stacked("workers")


def make_mesh(config):
    """Return a mesh with a layout that shards workers over its data axis."""
    names = ("fsdp", "context", "expert", "pipe", "microbatches", "sequence_parallel")
    refused = [name for name in names if getattr(config.mesh, name) != getattr(train.MeshOptions, name)]
    if refused:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in refused)
        raise ValueError(f"a worker of this recipe has one device, or several of --tensor: {flags} is not supported")
    mesh = config.mesh.make_mesh()
    devices = mesh.shape["data"]
    if config.workers < 2 or config.workers % devices:
        raise ValueError(f"--workers {config.workers}: expected 2 or more, a multiple of the {devices} data devices")
    if config.batch_size % config.workers:
        raise ValueError(f"--batch-size {config.batch_size} does not divide over --workers {config.workers}")
    if uneven := [period for period in config.periods if period < 1 or config.steps % period]:
        raise ValueError(f"--periods {uneven[0]}: expected a divisor of --steps {config.steps}, to end with an average")
    return shard_workers(mesh)


def shard_workers(mesh):
    return dataclasses.replace(mesh, layout=mesh.layout.with_dims(workers=("data",)))


@eqx.filter_jit
def replicate(model, count, mesh):
    """Give each worker a replica of the model; compiled, so that a device only makes its own."""
    replicas = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), eqx.filter(model, eqx.is_array))
    return zoo.place(Workers(eqx.combine(replicas, model)), mesh)


def clip_each_worker(max_norm):
    """Clip the gradient of each worker by its own norm: a norm over all workers would be communication."""
    clip = optax.clip_by_global_norm(max_norm)
    return optax.stateless(lambda grads, params: jax.vmap(lambda x: clip.update(x, optax.EmptyState())[0])(grads))


def make_optimizer(config, schedule, clip):
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    return optax.chain(clip, adamw)


def make_outer_optimizer(config):
    return optax.sgd(config.outer_rate, momentum=config.outer_momentum, nesterov=True)


def make_sync_step(loss_fn, optimizer, mesh):
    """Return a step of data parallelism: the gradient of all rows is all-reduced in each step."""
    gradient = zoo.value_and_grad(loss_fn, mesh)

    @eqx.filter_jit(donate="all-except-first")
    def sync_step(batch, model, opt_state):
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    return sync_step


def make_inner_step(loss_fn, optimizer, mesh):
    """Return a step of all workers, each with its replica, its rows and its moments: they send each other nothing."""

    def mean_loss(params, replica, rows):
        total, count = loss_fn(eqx.combine(params, replica), rows)
        return total / count

    def worker_gradients(workers, batch):  # runs on each device, for its workers
        params = zoo.trainable(workers).replicas
        here = len(jax.tree.leaves(params)[0])
        rows = jax.tree.map(lambda x: x.reshape(here, -1, *x.shape[1:]), batch)
        losses, grads = eqx.filter_vmap(jax.value_and_grad(mean_loss))(params, workers.replicas, rows)
        return losses, Workers(grads)

    gradient = zoo.spmd(worker_gradients, mesh, out="workers")

    @eqx.filter_jit(donate="all-except-first")
    def inner_step(batch, workers, opt_state):
        losses, grads = gradient(workers, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(workers))
        workers = zoo.place(eqx.apply_updates(workers, updates), mesh)
        return workers, opt_state, {"losses": losses, "gradient_norm": jax.vmap(optax.tree.norm)(grads)}

    return inner_step


def make_outer_step(optimizer, count, mesh):
    """Return the outer step: an all-reduce of the parameters, which is all that DiLoCo sends."""

    @eqx.filter_jit(donate="all")
    def outer_step(workers, model, opt_state):
        shared = zoo.trainable(model)
        means = jax.tree.map(lambda x: x.mean(0), zoo.trainable(workers).replicas)
        outer_grads = jax.tree.map(jnp.subtract, shared, means)
        updates, opt_state = optimizer.update(outer_grads, opt_state, shared)
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return replicate(model, count, mesh), model, opt_state, {"outer_gradient_norm": optax.tree.norm(outer_grads)}

    return outer_step


def count_bytes(config, model):
    """Return the bytes that a worker sends in a ring all-reduce of float32 parameters, or of their gradients."""
    return 2 * (config.workers - 1) / config.workers * 4 * zoo.count(model)


def train_sync(config, mesh, corpus, name, model, loss_fn, evaluate, schedule, steps):
    """Train by data parallelism, in a run of its own; return the model and the run."""
    optimizer = make_optimizer(config, schedule, optax.clip_by_global_norm(1.0))
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
    sync_step = make_sync_step(loss_fn, optimizer, mesh)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)

    with train.Run(config, name=name, mesh=mesh, data=corpus, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, steps):
            model, opt_state, metrics = sync_step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model), bytes_sent=run.step * count_bytes(config, model))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)
    batches.close()
    return model, run


def train_diloco(config, mesh, corpus, name, model, loss_fn, evaluate, schedule, period):
    """Train by DiLoCo with `period` inner steps for each outer step, in a run of its own; return the run."""
    workers = replicate(model, config.workers, mesh)
    optimizer = make_optimizer(config, schedule, clip_each_worker(1.0))
    opt_state = zoo.place(optimizer.init(zoo.trainable(workers)), mesh.optimizer)
    outer = make_outer_optimizer(config)
    outer_state = zoo.place(outer.init(zoo.trainable(model)), mesh.optimizer)
    inner_step = make_inner_step(loss_fn, optimizer, mesh)
    outer_step = make_outer_step(outer, config.workers, mesh)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)

    with train.Run(config, name=name, mesh=mesh, data=corpus, model=model) as run:
        workers, opt_state, model, outer_state = run.restore((workers, opt_state, model, outer_state), batches)
        for batch in run.steps(batches, config.steps):
            workers, opt_state, metrics = inner_step(batch, workers, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(period):
                workers, model, outer_state, metrics = outer_step(workers, model, outer_state)
                run.log(**metrics)
            if run.every(max(config.eval_every, period)):  # of the shared parameters: between outer steps they stay
                run.log(**evaluate(model), bytes_sent=run.step // period * count_bytes(config, model))
            if run.due(config.eval_every):
                run.save((workers, opt_state, model, outer_state), batches)
    batches.close()
    return run


def main(config: Config) -> None:
    mesh = make_mesh(config)
    directory = None if config.start is None else zoo.weights.resolve_directory(config.start)
    tokenizer = None if directory is None else train.read_tokenizer(directory)
    corpus = train.load_text(config.data, vocab=config.vocab, tokenizer=tokenizer)
    held_out = corpus.validation.ordered(config.seq_len, config.batch_size, limit=16)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    evaluate = train.Evaluation(loss_fn, mesh, validation=held_out)
    if directory is not None:
        start = config.mesh.apply(zoo.load(directory, mesh=mesh, dtype="float32"))
    else:
        start = zoo.init(partial(make_model, config, corpus.vocab), jax.random.key(config.run.seed), mesh)
        constant = train.warmup_stable_decay(config.learning_rate, config.warmup_steps, config.pretrain_steps, 0)
        options = (loss_fn, evaluate, jax.jit(constant), config.pretrain_steps)
        start, run = train_sync(config, mesh, corpus, "pretrain", start, *options)
        if run.stopped:
            return
    before = evaluate(start)["validation"]

    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    rows = []
    for name, period in {"sync": 1, **{f"h{period}": period for period in config.periods}}.items():
        model = jax.tree.map(jnp.copy, start)  # steps donate their arrays
        options = (loss_fn, evaluate, schedule)
        if name == "sync":
            _, run = train_sync(config, mesh, corpus, name, model, *options, config.steps)
        else:
            run = train_diloco(config, mesh, corpus, name, model, *options, period)
        if run.stopped:
            return
        rows.append(tabulate(config, name, period, train.summary(run.directory)))

    tools.report_runs(
        config,
        "DiLoCo and synchronous training",
        rows,
        description=f"{config.workers} workers on {mesh}: {config.steps} steps from {before:.3f} bits per byte",
        tokens_per_step=config.batch_size * config.seq_len,
        plots={"Held-out loss against communication": plot_communication(config, rows)},
    )


def tabulate(config, name, period, last):
    return {
        "run": name,
        "inner steps": period,
        "all-reduces": config.steps // period,
        "parameters sent": round(last["bytes_sent"] / 4),
        "MB sent": last["bytes_sent"] / 1e6,
        "bits per byte": last["validation"],
    }


def plot_communication(config, rows):
    """Plot the evaluations of each run against what a worker had sent by then."""
    curves = []
    for row in rows:
        lines = train.read_metrics(config.run.out / row["run"] / "metrics.jsonl")
        evaluated = [line for line in lines if "validation" in line]
        sent = [line["bytes_sent"] for line in evaluated]
        losses = [line["validation"] for line in evaluated]
        curves.append(tools.report.Curve(row["run"], sent, losses))
    return tools.report.ScatterChart(curves, "bits per byte", "bytes sent by each worker", from_zero=False)


if __name__ == "__main__":
    train.run_cli(main, Config)
