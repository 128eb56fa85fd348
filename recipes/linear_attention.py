"""Set recurrent mixers beside attention at equal parameters: 2.41 bits per byte with Mamba-2, 2.69 with attention.

    python recipes/linear_attention.py                    # five models, one after another, on two cores
    python recipes/linear_attention.py --resume           # after Ctrl-C; on another mesh too
    python recipes/linear_attention.py --mixers attention rwkv7 --embed 512 --layers 12 --heads 8 --seq-len 2048 --fsdp 8

All see the same batches of Python's standard library in the same order, and differ in one thing: what lets a token see
those before it. The SwiGLUs between make up for what one mixer has in parameters and another has not. Each run has a
folder with metrics and checkpoints in the folder of all, which at the end gets report.html: loss against tokens, and a
table of bits per byte, tokens a second, and bytes that decoding has to keep. docs/recurrences.md has the figures.
"""

from functools import partial
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import numpy as np

from zoo import train  # isort: skip  (before optax: it says which command installs what is missing)
import optax

import zoo
from zoo import layers
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim

Name = Literal[
    "attention", "linear-attention", "retention", "gla", "hgrn2", "mlstm", "delta-net", "gated-delta-net",
    "kimi-delta-attention", "gated-delta-product", "rwkv6", "rwkv7", "rg-lru", "mamba2",
]  # fmt: skip
FEW: tuple[Name, ...] = ("attention", "retention", "gla", "gated-delta-net", "mamba2")


def makers(embed, heads):
    """A maker of each mixer, called with `embed` and `key`. Options stand here where a paper's are others."""
    size = embed // heads
    norm = partial(layers.RMSNorm, size, features=Dim("head_dim"))
    with_heads = {
        "attention": partial(layers.Attention, rotary=Rotary(size), qk_norm=norm),
        "linear-attention": layers.LinearAttention,
        "retention": layers.Retention,
        "gla": layers.GatedLinearAttention,
        "hgrn2": layers.HGRN2,
        "mlstm": layers.MLSTM,
        "delta-net": layers.DeltaNet,
        "gated-delta-net": layers.GatedDeltaNet,
        "kimi-delta-attention": layers.KimiDeltaAttention,
        "gated-delta-product": layers.GatedDeltaProduct,
        "rwkv6": layers.RWKV6,
        "rwkv7": layers.RWKV7,
        "rg-lru": layers.RGLRU,
    }
    mamba2 = partial(
        layers.Mamba2, head_dim=size, state_dim=size
    )  # twice as many heads: it is twice as wide as the stream
    return {name: partial(mixer, heads=heads) for name, mixer in with_heads.items()} | {"mamba2": mamba2}


def main(
    *,
    mixers: tuple[Name, ...] = FEW,
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 64,
    layers: int = 2,
    heads: int = 2,
    mlp_dim: int = 256,
    seq_len: int = 128,
    batch_size: int = 16,
    microbatches: int = 1,
    steps: int = 200,
    learning_rate: float = 6e-3,
    warmup_steps: int = 30,
    weight_decay: float = 0.1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    remat: zoo.parallel.Remat = "elementwise",
    fsdp: int = 1,
    tensor: int = 1,
    eval_every: int = 50,
    seed: int = 0,
    out: Path = Path("runs/linear_attention"),
    resume: bool = False,
    profile: bool = False,
) -> None:
    """Train one after another, compare.

    Args:
        mixers: Which of the mixers.
        data: Files and folders of text; this Python's standard library where there are none.
        vocab: 256 for bytes; more for byte pairs, learnt from the text on the spot.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Heads of a mixer, embed / heads wide each.
        mlp_dim: Width of the gated MLP beside attention. The others' is what makes their parameters as many.
        seq_len: Tokens in a row.
        batch_size: Rows in a step, on all devices together.
        microbatches: Parts in which a device takes its rows, one after another, to save memory.
        steps: Optimizer steps of each run.
        learning_rate: Peak of the learning rate, after warm-up; it falls to a tenth as a cosine does.
        warmup_steps: Steps of warm-up.
        weight_decay: Of matrices and embeddings, as in AdamW.
        dtype: What models compute in; parameters and their updates are float32, and so are states and decays.
        remat: What the backward pass computes again to save memory.
        fsdp: Devices that share each copy of the parameters.
        tensor: Devices that share each head, MLP and vocabulary. All that remain split the batch.
        eval_every: Steps between validations, each with a checkpoint.
        seed: Of parameters and the order of the text.
        out: The folder of all runs.
        resume: Go on from the newest checkpoint in `out`.
        profile: Trace a few steps of each run into the folder `profile` of its own.
    """
    config = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    known = makers(embed, heads)
    if not mixers or set(mixers) - known.keys():
        raise ValueError(f"name one or more of the mixers {', '.join(known)}, not {', '.join(mixers) or 'none'}")
    if steps < 1:
        raise ValueError(f"steps={steps} are at least 1")
    mesh = zoo.make_mesh(fsdp=fsdp, tensor=tensor)
    corpus = train.load_text(data, vocab=vocab)
    held_out = corpus.validation.ordered(seq_len, batch_size, limit=8)
    placed = [zoo.place_batch(rows, mesh) for rows in held_out]

    def make(name, mlp, key):
        sizes = {"vocab": corpus.vocab, "embed": embed, "layers": layers, "mlp": mlp}
        return zoo.models.Hybrid(**sizes, pattern=[known[name]], remat=remat, key=key)

    def in_shapes(name, mlp):
        return eqx.filter_eval_shape(partial(make, name, mlp), jax.random.key(seed))

    # In shapes alone: widths at which all have as many parameters; and what cannot be laid out says so now.
    target, unit = zoo.count(in_shapes("attention", mlp_dim)), 8 * tensor
    widths = {}
    for name in mixers:
        spare = target - zoo.count(in_shapes(name, unit))
        widths[name] = unit + round(spare / (3 * embed * layers * unit)) * unit
        if widths[name] < unit:
            raise ValueError(f"{name} has more parameters without an MLP than attention with one: raise mlp={mlp_dim}")
    shapes = {name: in_shapes(name, width) for name, width in widths.items()}
    layouts = {name: train.tabulate_parameters(model, mesh) for name, model in shapes.items()}

    warmup_steps = min(warmup_steps, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss

    def validate(model):
        losses = jax.device_get([zoo.value(loss_fn, mesh)(model, rows) for rows in placed])
        mean = np.average(losses, weights=[rows["weights"].sum() for rows in held_out])
        return float(train.bits_per_byte(float(mean), held_out))

    tokens = batch_size * seq_len
    for name, width in widths.items():
        model = zoo.init(partial(make, name, width), jax.random.key(seed), mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(seq_len, batch_size, seed=seed)
        with train.Run(out / name, config=config | {"run": name}, resume=resume, profile=profile) as run:
            run.print_line(f"{name}: {zoo.count(model):,} parameters, an MLP of {width}; on {mesh}; {corpus}")
            model, opt_state = run.restore((model, opt_state), batches)
            for inputs in run.steps(batches, steps, tokens=tokens, flops=6 * tokens * zoo.count(model)):
                model, opt_state, loss = step(zoo.place_batch(inputs, mesh), model, opt_state)
                run.log(loss=loss)
                validation = validate(model) if run.every(eval_every) else None
                if validation is not None:
                    run.log(validation=validation)
                if run.due(eval_every):
                    run.save((model, opt_state), batches, metric=validation)
        if run.stopped:
            return

    rows = [summed_up(name, out / name, shapes[name], (seq_len, 64 * seq_len)) for name in mixers]
    results = {row["mixer"]: f"{row['bits per byte']:.3f} bits per byte" for row in rows}
    report = train.write_report(
        out,
        title="Recurrent mixers beside attention",
        summary=f"Held-out text after {steps * tokens:,} tokens on {mesh}: {', '.join(map(' '.join, results.items()))}",
        runs={name: out / name for name in mixers},
        curves={"validation": "validation"},
        unit="bits per byte",
        tokens_per_step=tokens,
        tables={"In the end": rows},
        parameters=layouts[mixers[-1]],
    )
    for name, result in results.items():
        print(f"{name:>20}: {result}")
    print(f"the report lies in {report}")


def summed_up(name, folder, model, lengths):
    """What a run came to, from its folder; and what one row of so many tokens leaves to remember, in bytes."""
    last = {name: value for line in train.read_metrics(folder / "metrics.jsonl") for name, value in line.items()}
    speeds = [line.get("tokens_per_second") for line in train.read_metrics(folder / "timing.jsonl")]
    return {
        "mixer": name,
        "parameters": zoo.count(model),
        "bits per byte": last["validation"],
        "tokens/s": round(float(np.median([speed for speed in speeds if speed] or [0]))),
        **{f"bytes of state after {length:,} tokens": zoo.inspect.state_bytes(model, length) for length in lengths},
    }


if __name__ == "__main__":
    train.run_cli(main)
