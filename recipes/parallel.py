"""Train one model on any mesh and on one device: equal losses, the collectives of each axis, the memory they save.

    python recipes/parallel.py                            # fsdp 2 x context 2 x tensor 2, of 8 devices the CPU emulates
    python recipes/parallel.py --fsdp 8 --context 1 --tensor 1 --zero-stage 1
    python recipes/parallel.py --fsdp 1 --tensor 4 --sequence-parallel --context-attention heads
    python recipes/parallel.py --resume                   # after Ctrl-C; completed runs are read back

All devices that no axis takes shard the batch. Emulated devices share a CPU: the table shows bytes, not time. Half of
the layers are attention, whose keys travel along `context`, and half recurrences, which compose states of fixed size.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import optax

import zoo
from zoo import layers as zl
from zoo import tools, train
from zoo.tools.draw import draw_layout

REASONS = {
    "data": "sums of gradients and of the loss",
    "fsdp": "parameters gathered before use, gradients scattered to their owners",
    "context": "keys and values of attention, states of recurrences, sums of gradients over tokens",
    "tensor": "partial sums of matrix products, and softmax over the vocabulary",
    "pipe": "hidden states and their gradients, between stages and at both ends",
}


@dataclass(frozen=True)
class Config:
    """Train on one device and on the mesh, compare."""

    data: tuple[Path, ...] = ()  # Files and directories of text; by default this Python's standard library.
    vocab: int = 256  # 256 for bytes; more trains a byte-pair encoding on the text.
    embed: int = 64  # Width of the residual stream.
    layers: int = 2  # Number of blocks, alternately of a gated delta rule and of attention.
    heads: int = 8  # Heads of a mixer, embed / heads wide each.
    mlp_dim: int = 256  # Width of the gated MLP.
    seq_len: int = 128  # Tokens per sequence.
    batch_size: int = 16  # Sequences per step, over all devices.
    steps: int = 20  # Optimizer steps of each run.
    learning_rate: float = 3e-3  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 5  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.1  # AdamW's, of matrices and embeddings.
    save_every: int = 10  # Steps between checkpoints.
    mesh: train.MeshOptions = train.MeshOptions(fsdp=2, context=2, tensor=2)
    run: train.RunOptions = train.RunOptions(Path("runs/parallel"))


def main(config: Config) -> None:
    check(config)
    meshes = {"one-device": zoo.make_mesh(devices=jax.devices()[:1]), "mesh": config.mesh.make_mesh()}
    key = jax.random.key(config.run.seed)
    corpus = train.load_text(config.data, vocab=config.vocab)

    def make_model(key):
        size = config.embed // config.heads
        norm = partial(zl.RMSNorm, size, features=zoo.parallel.Dim("head_dim"))
        delta_net = partial(zl.GatedDeltaNet, heads=config.heads)
        rotary = zoo.ops.rotary.Rotary(size)
        attention = partial(zl.Attention, heads=config.heads, rotary=rotary, qk_norm=norm)
        model = zoo.models.Hybrid(
            vocab=corpus.vocab,
            embed=config.embed,
            layers=config.layers,
            mlp=config.mlp_dim,
            pattern=[delta_net, attention][: config.layers],
            key=key,
        )
        return config.mesh.apply(model)

    meshes["mesh"].specs(eqx.filter_eval_shape(make_model, key))  # sizes that do not fit raise now

    peak = config.learning_rate
    warmup = min(config.warmup_steps, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    def make_step(mesh):
        gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)

        @eqx.filter_jit(donate="all-except-first")
        def step(batch, model, opt_state):
            loss, grads = gradient(model, batch)
            updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
            model = zoo.place(eqx.apply_updates(model, updates), mesh)
            return model, opt_state, loss, optax.tree.norm(grads)

        return step

    tokens = config.batch_size * config.seq_len
    rows = []
    collectives = []
    serial_losses = None
    for name, mesh in meshes.items():
        step = make_step(mesh)
        model = zoo.init(make_model, key, mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        row = {"run": name, "parameters": bytes_per_device(model), "optimizer": bytes_per_device(opt_state)}
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
        if serial_losses is None:
            serial_losses = losses
        if program.memory is not None:
            row["temporaries"] = program.memory.temporaries
            row["all bytes"] = program.memory.total
        row["loss"] = losses[-1]
        row["largest difference"] = f"{largest_difference(losses, serial_losses):.1e}"
        row["bytes sent"] = sum(each.bytes for each in program.collectives)
        if program.exposed_seconds is not None:
            row["exposed seconds"] = program.exposed_seconds
        rows.append(row)
        collectives += tabulate_collectives(name, program)

    tools.report_runs(
        config.run.out,
        "One model on one device and on a mesh",
        rows,
        config=config,
        description=f"{config.steps} steps on one device and on {mesh}; bytes are those of one device in one step",
        curves={"loss": "loss"},
        unit="nats per token",
        plots={"The layout": tools.report.Picture(partial(draw_layout, model, mesh, seq_len=config.seq_len))},
        tables={"Collectives of a step": collectives},
        parameters=tools.report.tabulate_parameters(model, mesh),
        tokens_per_step=tokens,
    )


def check(config: Config) -> None:
    """Refuse sizes that cannot be trained, before text is read."""
    if min(config.steps, config.save_every, config.layers) < 1:
        raise ValueError(
            f"steps={config.steps}, save_every={config.save_every} and layers={config.layers} are at least 1"
        )
    if config.embed % config.heads:
        raise ValueError(f"heads={config.heads} do not divide embed={config.embed}")


def abstract_batch(config, mesh):
    """Return a batch without numbers, to compile the step for."""
    shape = (config.batch_size, config.seq_len)
    dtypes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    return zoo.place_batch({name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}, mesh)


def bytes_per_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree) if eqx.is_array(x))


def largest_difference(losses, others):
    return max(abs(loss - other) for loss, other in zip(losses, others, strict=True))


def tabulate_collectives(name, program):
    """Return a row for each kind of collective of a program: its axes, count, bytes, and what it is of."""
    rows = []
    for each in program.collectives:
        axes = each.axes or ()
        row = {
            "run": name,
            "collective": each.kind,
            "along": " x ".join(axes) or each.groups or "no axis",
            "times": each.count,
            "bytes": each.bytes,
            "of": "; ".join(REASONS[axis] for axis in axes),
        }
        rows.append(row)
    return rows


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # a CPU emulates eight; accelerators are as many as there are
    train.run_cli(main, Config)
