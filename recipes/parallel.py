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
import numpy as np
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
class Config(train.ModelConfig):  # batch_size, steps, learning_rate, ..., data, seq_len, vocab, embed, ...
    """Train on one device and on the mesh, compare."""

    layers: int = 2  # Number of blocks, alternately of a gated delta rule and of attention.
    heads: int = 8
    steps: int = 20
    warmup_steps: int = 5
    eval_every: int = 10
    """Steps between checkpoints."""
    mesh: train.MeshOptions = train.MeshOptions(fsdp=2, context=2, tensor=2)
    run: train.RunOptions = train.RunOptions(Path("runs/parallel"))


def make_model(config, vocab, key):
    size = config.embed // config.heads
    norm = partial(zl.RMSNorm, size, features=zoo.parallel.Dim("head_dim"))
    rotary = zoo.ops.rotary.Rotary(size)
    attention = partial(zl.Attention, heads=config.heads, rotary=rotary, qk_norm=norm)
    pattern = [partial(zl.GatedDeltaNet, heads=config.heads), attention][: config.layers]
    sizes = {"vocab": vocab, "embed": config.embed, "layers": config.layers, "mlp": config.mlp_dim}
    return config.mesh.apply(zoo.models.Hybrid(**sizes, pattern=pattern, key=key))


def train_on(mesh, name, config, corpus):
    """Train the model on a mesh, in a run of its own; return the run, the model and its compiled step."""
    model = zoo.init(partial(make_model, config, corpus.vocab), jax.random.key(config.run.seed), mesh)
    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)

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
    return run, model, program


def main(config: Config) -> None:
    if config.embed % config.heads:
        raise ValueError(f"heads={config.heads} do not divide embed={config.embed}")
    mesh = config.mesh.make_mesh()
    corpus = train.load_text(config.data, vocab=config.vocab)
    mesh.specs(eqx.filter_eval_shape(make_model, config, corpus.vocab, jax.random.key(0)))  # what does not fit raises

    rows = []
    collectives = []
    losses = {}
    for name, place in {"one-device": zoo.make_mesh(devices=jax.devices()[:1]), "mesh": mesh}.items():
        run, model, program = train_on(place, name, config, corpus)
        if run.stopped:
            return
        losses[name] = np.array([line["loss"] for line in train.read_metrics(run.directory / "metrics.jsonl")])
        row = {
            "run": name,
            "bytes held": program.memory and program.memory.arguments,  # of parameters and optimizer state, mostly
            "temporaries": program.memory and program.memory.temporaries,
            "bytes sent": sum(each.bytes for each in program.collectives),
            "exposed seconds": program.exposed_seconds or "not known",
            "loss": losses[name][-1],
            "largest difference": f"{np.abs(losses[name] - losses['one-device']).max():.1e}",
        }
        rows.append(row)
        for each in program.collectives:
            axes = each.axes or ()
            reasons = "; ".join(REASONS[axis] for axis in axes)
            along = " x ".join(axes) or each.groups or "no axis"
            sums = {"times": each.count, "bytes": each.bytes, "of": reasons}
            collectives.append({"run": name, "collective": each.kind, "along": along, **sums})

    tools.report_runs(
        config,
        "One model on one device and on a mesh",
        rows,
        description=f"{config.steps} steps on one device and on {mesh}; bytes are those of one device in one step",
        curves={"loss": "loss"},
        unit="nats per token",
        plots={"The layout": tools.report.Picture(partial(draw_layout, model, mesh, seq_len=config.seq_len))},
        tables={"Collectives of a step": collectives},
        parameters=tools.report.tabulate_parameters(model, mesh),
        tokens_per_step=config.batch_size * config.seq_len,
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # a CPU emulates eight; accelerators are as many as there are
    train.run_cli(main, Config)
