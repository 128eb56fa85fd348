"""Compare recurrent mixers with attention at equal parameters: 2.41 bits per byte with Mamba-2, 2.69 with attention.

    python recipes/linear_attention.py                    # five models in sequence, on two cores
    python recipes/linear_attention.py --resume           # after Ctrl-C; on another mesh too
    python recipes/linear_attention.py --mixers attention rwkv7 --embed 512 --layers 12 --seq-len 2048 --fsdp 8

Models differ in the mixer alone and see the same batches; SwiGLU widths equalize parameters: docs/recurrences.md.
"""

from functools import partial
from pathlib import Path

import equinox as eqx
import jax

import zoo
from zoo import layers as zl
from zoo import tools, train

import optax

WITH_HEADS = {
    "linear-attention": zl.LinearAttention, "retention": zl.Retention, "gla": zl.GatedLinearAttention,
    "hgrn2": zl.HGRN2, "mlstm": zl.MLSTM, "delta-net": zl.DeltaNet, "gated-delta-net": zl.GatedDeltaNet,
    "kimi-delta-attention": zl.KimiDeltaAttention, "gated-delta-product": zl.GatedDeltaProduct,
    "rwkv6": zl.RWKV6, "rwkv7": zl.RWKV7, "rg-lru": zl.RGLRU,
}  # fmt: skip


def mixer_factories(embed, heads):
    """Mixers by name, called with `embed` and `key`; options are those of the papers."""
    size = embed // heads
    norm = partial(zl.RMSNorm, size, features=zoo.parallel.Dim("head_dim"))
    factories = {"attention": partial(zl.Attention, rotary=zoo.ops.rotary.Rotary(size), qk_norm=norm, heads=heads)}
    factories |= {name: partial(mixer, heads=heads) for name, mixer in WITH_HEADS.items()}
    return factories | {"mamba2": partial(zl.Mamba2, head_dim=size, state_dim=size)}  # 2 * heads: expand is 2


def main(
    *,
    mixers: tuple[str, ...] = ("attention", "retention", "gla", "gated-delta-net", "mamba2"),
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 64,
    layers: int = 2,
    heads: int = 2,
    mlp_dim: int = 256,
    seq_len: int = 128,
    batch_size: int = 16,
    steps: int = 200,
    learning_rate: float = 6e-3,
    warmup_steps: int = 30,
    weight_decay: float = 0.1,
    eval_every: int = 50,
    mesh_options: train.MeshOptions = train.MeshOptions(),
    run_options: train.RunOptions = train.RunOptions(Path("runs/linear_attention")),
) -> None:
    """Train a model of each mixer, compare.

    Args:
        mixers: Names of mixers.
        data: Files and directories of text; by default this Python's standard library.
        vocab: 256 for bytes; more trains a byte-pair encoding on the text.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Heads of a mixer, embed / heads wide each.
        mlp_dim: Width of the gated MLP after attention; that of the others equalizes the parameters.
        seq_len: Tokens per sequence.
        batch_size: Sequences per step, over all devices.
        steps: Optimizer steps of each run.
        learning_rate: Peak learning rate, after linear warmup; cosine decay to a tenth.
        warmup_steps: Steps of linear warmup, at most half of all.
        weight_decay: AdamW's, of matrices and embeddings.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, mesh, warmup_steps = dict(locals()), mesh_options.make_mesh(), min(warmup_steps, steps // 2)
    factories = mixer_factories(embed, heads)
    train.check_names("mixers", mixers, factories)
    if steps < 1:
        raise ValueError(f"{steps=} are at least 1")
    corpus, key = train.load_text(data, vocab=vocab), jax.random.key(run_options.seed)

    def make(name, mlp, key):
        sizes = {"vocab": corpus.vocab, "embed": embed, "layers": layers, "mlp": mlp}
        return mesh_options.apply(zoo.models.Hybrid(**sizes, pattern=[factories[name]], key=key))

    abstract, unit, widths = partial(eqx.filter_eval_shape, make, key=key), 8 * mesh_options.tensor, {}
    target = zoo.count(abstract("attention", mlp_dim))
    for name in mixers:
        spare = target - zoo.count(abstract(name, unit))
        widths[name] = unit + round(spare / (3 * embed * layers * unit)) * unit
        if widths[name] < unit:
            raise ValueError(f"{name} has more parameters without an MLP than attention with one: raise mlp={mlp_dim}")
        mesh.specs(abstract(name, widths[name]))  # sizes that do not fit raise now, not in an hour
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = mesh_options.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw))

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, mesh_options.dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        scale = train.loss_scale(opt_state)
        loss, grads = zoo.value_and_grad(loss_fn, mesh, **mesh_options.accumulation)(model, batch, loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss, optax.tree.norm(grads)

    evaluate = train.Evaluation(loss_fn, mesh, validation=corpus.validation.ordered(seq_len, batch_size, limit=8))
    tokens, lengths, rows = batch_size * seq_len, [seq_len, 64 * seq_len], []
    for name, width in widths.items():
        model = zoo.init(partial(make, name, width), key, mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(seq_len, batch_size, seed=run_options.seed, process=zoo.parallel.reader(mesh))
        with train.Run(run_options.subrun(name), config=config | {"run": name}) as run:
            run.print_line(f"{name}: {zoo.count(model):,} parameters, an MLP of {width}; on {mesh}; {corpus}")
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, steps, tokens=tokens, flops=6 * tokens * zoo.count(model)):
                model, opt_state, loss, norm = step(zoo.place_batch(batch, mesh, vocab=corpus.vocab), model, opt_state)
                run.log(
                    loss=loss, gradient_norm=norm, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1)
                )
                if run.every(eval_every):
                    run.log(**evaluate(model))
                if run.due(eval_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return
        last, row = train.summary(run.directory), {"run": name, "parameters": zoo.count(model)}
        row |= {"bits per byte": last["validation"], "tokens/s": round(last["tokens_per_second"])}
        rows.append(row | {f"bytes of state after {n:,} tokens": zoo.inspect.state_bytes(model, n) for n in lengths})
    tools.report_runs(
        run_options.out,
        "Recurrent mixers and attention",
        rows,
        description=f"{steps} steps on {mesh}",
        tokens_per_step=tokens,
        parameters=tools.report.tabulate_parameters(model, mesh),
        recipe=main,
    )


if __name__ == "__main__":
    train.run_cli(main)
