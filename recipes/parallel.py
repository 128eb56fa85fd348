"""Train one model on any mesh and on one device: equal losses, the collectives of each axis, the memory they save.

    python recipes/parallel.py                            # fsdp 2 x context 2 x tensor 2, of 8 devices the CPU emulates
    python recipes/parallel.py --fsdp 8 --context 1 --tensor 1 --zero-stage 1
    python recipes/parallel.py --fsdp 1 --tensor 4 --sequence-parallel --context-attention heads
    python recipes/parallel.py --resume                   # after Ctrl-C; completed runs are read back

All devices that no axis takes shard the batch. Emulated devices share a CPU: the table shows bytes, not time. Half of
the layers are attention, whose keys travel along `context`, and half recurrences, which compose states of fixed size.
"""

from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

import zoo
from zoo import layers as zl
from zoo import tools, train
from zoo.tools.draw import draw_layout

import optax

REASONS = {
    "data": "sums of gradients and of the loss",
    "fsdp": "parameters gathered before use, gradients scattered to their owners",
    "context": "keys and values of attention, states of recurrences, sums of gradients over tokens",
    "tensor": "partial sums of matrix products, and softmax over the vocabulary",
    "pipe": "hidden states and their gradients, between stages and at both ends",
}


def bytes_per_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree) if eqx.is_array(x))


def main(
    *,
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 64,
    layers: int = 2,
    heads: int = 8,
    mlp_dim: int = 256,
    seq_len: int = 128,
    batch_size: int = 16,
    steps: int = 20,
    learning_rate: float = 3e-3,
    warmup_steps: int = 5,
    weight_decay: float = 0.1,
    save_every: int = 10,
    mesh_options: train.MeshOptions = train.MeshOptions(fsdp=2, context=2, tensor=2),
    run_options: train.RunOptions = train.RunOptions(Path("runs/parallel")),
) -> None:
    """Train on one device and on the mesh, compare.

    Args:
        data: Files and directories of text; by default this Python's standard library.
        vocab: 256 for bytes; more trains a byte-pair encoding on the text.
        embed: Width of the residual stream.
        layers: Number of blocks, alternately of a gated delta rule and of attention.
        heads: Heads of a mixer, embed / heads wide each.
        mlp_dim: Width of the gated MLP.
        seq_len: Tokens per sequence.
        batch_size: Sequences per step, over all devices.
        steps: Optimizer steps of each run.
        learning_rate: Peak learning rate, after linear warmup; cosine decay to a tenth.
        warmup_steps: Steps of linear warmup, at most half of all.
        weight_decay: AdamW's, of matrices and embeddings.
        save_every: Steps between checkpoints.
    """
    config, mesh, warmup_steps = dict(locals()), mesh_options.make_mesh(), min(warmup_steps, steps // 2)
    if min(steps, save_every, layers) < 1 or embed % heads:
        raise ValueError(f"{steps=}, {save_every=} and {layers=} are at least 1, and {heads=} divide {embed=}")
    meshes = {"one-device": zoo.make_mesh(devices=jax.devices()[:1]), "mesh": mesh}
    corpus, key, size = train.load_text(data, vocab=vocab), jax.random.key(run_options.seed), embed // heads
    norm = partial(zl.RMSNorm, size, features=zoo.parallel.Dim("head_dim"))
    attention = partial(zl.Attention, heads=heads, rotary=zoo.ops.rotary.Rotary(size), qk_norm=norm)

    def make(key):
        pattern = [partial(zl.GatedDeltaNet, heads=heads), attention][:layers]
        sizes: dict[str, Any] = {"vocab": corpus.vocab, "embed": embed, "layers": layers, "mlp": mlp_dim}
        return mesh_options.apply(zoo.models.Hybrid(**sizes, pattern=pattern, key=key))

    mesh.specs(eqx.filter_eval_shape(make, key))  # sizes that do not fit raise now
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = mesh_options.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw))

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, mesh_options.dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        (batch, mesh), scale = inputs, train.loss_scale(opt_state)
        loss, grads = zoo.value_and_grad(loss_fn, mesh, **mesh_options.accumulation)(model, batch, loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss, optax.tree.norm(grads)

    rows, collectives, serial, tokens = [], [], [], batch_size * seq_len
    for name, mesh in meshes.items():
        model = zoo.init(make, key, mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        row: dict[str, Any] = {
            "run": name,
            "parameters": bytes_per_device(model),
            "optimizer": bytes_per_device(opt_state),
        }
        batches = corpus.train.batches(seq_len, batch_size, seed=run_options.seed, process=zoo.parallel.reader(mesh))
        kinds = {"tokens": "int32", "targets": "int32", "weights": "float32"}
        abstract = {name: jax.ShapeDtypeStruct((batch_size, seq_len), kind) for name, kind in kinds.items()}
        program = zoo.inspect.compiled(step, (zoo.place_batch(abstract, mesh), mesh), model, opt_state)
        if program.memory is not None:
            row |= {"temporaries": program.memory.temporaries, "all bytes": program.memory.total}
        with train.Run(run_options.subrun(name), config=config | {"run": name}) as run:
            run.print_line(f"{name}: {zoo.count(model):,} parameters on {mesh}; {corpus}\n{program}")
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, steps, tokens=tokens, flops=6 * tokens * zoo.count(model)):
                inputs = zoo.place_batch(batch, mesh, vocab=corpus.vocab), mesh
                model, opt_state, loss, norm = step(inputs, model, opt_state)
                run.log(
                    loss=loss, gradient_norm=norm, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1)
                )
                if run.due(save_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return
        losses = [line["loss"] for line in train.read_metrics(run.directory / "metrics.jsonl")]
        serial = serial or losses
        row |= {"loss": losses[-1], "largest difference": f"{max(map(lambda a, b: abs(a - b), losses, serial)):.1e}"}
        rows.append(row | {"bytes sent": sum(each.bytes for each in program.collectives)})
        collectives += [
            {"run": name, "collective": each.kind, "along": " x ".join(each.axes or ()) or each.groups or "no axis",
             "times": each.count, "bytes": each.bytes, "of": "; ".join(REASONS[axis] for axis in each.axes or ())}
            for each in program.collectives
        ]  # fmt: skip
    tools.report_runs(
        run_options.out,
        "One model on one device and on a mesh",
        rows,
        description=f"{steps} steps on one device and on {mesh}; bytes are those of one device in one step",
        curves={"loss": "loss"},
        unit="nats per token",
        plots={"The layout": tools.report.Picture.of(partial(draw_layout, model, mesh, seq_len=seq_len))},
        tables={"Collectives of a step": collectives},
        parameters=tools.report.tabulate_parameters(model, mesh),
        tokens_per_step=tokens,
        recipe=main,
    )


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # a CPU emulates eight; accelerators are as many as there are
    train.run_cli(main)
