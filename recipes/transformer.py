"""Teach a small Transformer the Python standard library: 300 steps, a minute on two cores, 2.3 bits per byte.

    python recipes/transformer.py                         # this machine's own library, byte by byte
    python recipes/transformer.py --resume                # after Ctrl-C; on another mesh too
    python recipes/transformer.py --data ~/books --vocab 4096 --out runs/books
    python recipes/transformer.py 1b --fsdp 8 --data /data/text

A run's folder gets its configuration, metrics and checkpoints and, at the end, report.html and export/: the model and
its tokens as a Hugging Face directory.
"""

from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo import train  # isort: skip  (before optax: it says which command installs what is missing)
import optax

import zoo

PRESETS = {
    "cpu": {},
    "1b": {
        "vocab": 32768, "embed": 2048, "layers": 20, "heads": 16, "mlp_dim": 5632, "seq_len": 4096, "batch_size": 64,
        "steps": 20_000, "learning_rate": 4e-4, "warmup_steps": 1000, "dtype": "bfloat16", "remat": "dots",
    },
}  # fmt: skip


def main(
    *,
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 128,
    layers: int = 4,
    heads: int = 2,
    kv_heads: int | None = None,
    mlp_dim: int = 384,
    dropout: float = 0.0,
    seq_len: int = 128,
    batch_size: int = 16,
    microbatches: int = 1,
    steps: int = 300,
    learning_rate: float = 3e-3,
    warmup_steps: int = 30,
    weight_decay: float = 0.1,
    ema_decay: float | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    remat: zoo.parallel.Remat = "elementwise",
    fsdp: int = 1,
    tensor: int = 1,
    zero_stage: Literal[1, 3] = 3,
    eval_every: int = 100,
    seed: int = 0,
    out: Path = Path("runs/transformer"),
    resume: bool = False,
    profile: bool = False,
) -> None:
    """Train, validate, sample, report.

    Args:
        data: Files and folders of text; this Python's standard library where there are none.
        vocab: 256 for bytes; more for byte pairs, learnt from the text on the spot.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads, embed / heads wide each.
        kv_heads: Heads of keys and values, shared by several queries each; as many as heads unless given.
        mlp_dim: Width of the gated MLP.
        dropout: Share of values dropped after embedding, attention and MLP.
        seq_len: Tokens in a row.
        batch_size: Rows in a step, on all devices together.
        microbatches: Parts in which a device takes its rows, one after another, to save memory.
        steps: Optimizer steps.
        learning_rate: Peak of the learning rate, after warm-up; it falls to a tenth as a cosine does.
        warmup_steps: Steps of warm-up.
        weight_decay: Of matrices and embeddings, as in AdamW.
        ema_decay: Decay of an average of the weights, say 0.999, which is then what is validated and sampled.
        dtype: What the model computes in; parameters and their updates are float32.
        remat: What the backward pass computes again to save memory.
        fsdp: Devices that share each copy of the parameters.
        tensor: Devices that share each head, MLP and vocabulary. All that remain split the batch.
        zero_stage: With fsdp, 3 splits parameters and optimizer state, 1 the optimizer state alone.
        eval_every: Steps between validations, each with a checkpoint.
        seed: Of parameters, dropout, the order of the text and the samples.
        out: The run's folder.
        resume: Go on from the newest checkpoint in `out`.
        profile: Trace a few steps into the folder `profile` of `out`, for Perfetto, XProf and TensorBoard.
    """
    config = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    mesh = zoo.make_mesh(fsdp=fsdp, tensor=tensor, layout=zoo.parallel.ZERO1 if zero_stage == 1 else None)
    corpus = train.load_text(data, vocab=vocab)
    batches = corpus.train.batches(seq_len, batch_size, seed=seed)
    held_out = corpus.validation.ordered(seq_len, batch_size, limit=16)
    placed = [zoo.place_batch(rows, mesh) for rows in held_out]

    model_key, dropout_key, sample_key = jax.random.split(jax.random.key(seed), 3)
    sizes = {"embed": embed, "layers": layers, "heads": heads, "kv_heads": kv_heads, "mlp": mlp_dim}
    options = {"vocab": corpus.vocab, "qk_norm": True, "dropout": dropout, "remat": remat}
    model = zoo.init(lambda key: zoo.models.Transformer(**sizes, **options, key=key), model_key, mesh)
    average = None if ema_decay is None else train.update_ema(None, model, ema_decay)

    warmup_steps = min(warmup_steps, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch, key=None):
        return zoo.cross_entropy(zoo.cast(model, dtype), batch, key=key)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, average, opt_state):
        batch, key = inputs
        loss, grads = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches)(model, batch, key=key)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        average = None if ema_decay is None else train.update_ema(average, model, ema_decay)
        return model, average, opt_state, train.bits_per_byte(loss, corpus.train)

    def validate(model):
        losses = jax.device_get([zoo.value(loss_fn, mesh)(model, rows) for rows in placed])
        mean = np.average(losses, weights=[rows["weights"].sum() for rows in held_out])
        return float(train.bits_per_byte(float(mean), held_out))

    tokens = batch_size * seq_len
    flops = 6 * tokens * (zoo.count(model) + layers * embed * seq_len)  # a multiply-add forward, two backward; causal
    validation = None
    with train.Run(out, config=config, resume=resume, profile=profile) as run:
        run.print_line(f"{zoo.count(model):,} parameters on {mesh}; {corpus}")
        model, average, opt_state = run.restore((model, average, opt_state), batches)
        for inputs in run.steps(batches, steps, tokens=tokens, flops=flops):
            key = jax.random.fold_in(dropout_key, run.step)
            inputs = zoo.place_batch(inputs, mesh), key
            model, average, opt_state, bits = step(inputs, model, average, opt_state)
            run.log(bits_per_byte=bits)
            validation = validate(eqx.combine(average, model)) if run.every(eval_every) else None
            if validation is not None:
                run.log(validation=validation)
            if run.due(eval_every):
                run.save((model, average, opt_state), batches, metric=validation)

    if run.stopped:
        return
    best = eqx.combine(average, model)  # the average where there is one
    validation = validate(best) if validation is None else validation  # None: it was complete when it was resumed
    samples = sample(best, corpus, mesh, sample_key)
    exported = train.export(best, corpus, out / "export", seq_len=seq_len)
    report = train.write_report(
        out,
        title="A Transformer from scratch",
        summary=f"{validation:.3f} bits per byte on held-out text after {steps} steps on {mesh}",
        curves={"bits_per_byte": "training", "validation": "validation"},
        baselines={"xz -9e": corpus.xz_bits_per_byte},
        unit="bits per byte",
        headline={"bits per byte": f"{validation:.3f}", "parameters": f"{zoo.count(model):,}"},
        samples=samples,
        parameters=train.tabulate_parameters(model, mesh),
    )
    print(f"\n{''.join(samples[0])}\n\n{validation:.3f} bits per byte on held-out text; the report lies in {report}")
    print(f"the model lies in {exported}, for zoo.load and transformers; recipes/finetune.py goes on from it")


def sample(model, corpus, mesh, key):
    """Continue a few beginnings: (prompt, continuation) pairs."""
    prompts = ["def main(", "class Node:\n    ", "import os\n"]
    begun = [np.append(0, corpus.encode(prompt)) for prompt in prompts]  # a document begins with a separator
    width = max(map(len, begun))
    tokens = jnp.asarray([np.pad(row, (width - len(row), 0)) for row in begun])
    mask = jnp.asarray([np.arange(width) >= width - len(row) for row in begun])
    new = zoo.generate(model, tokens, max_new_tokens=200, mask=mask, temperature=0.7, mesh=mesh, key=key)
    return [(prompt, corpus.decode(row)) for prompt, row in zip(prompts, new, strict=True)]


if __name__ == "__main__":
    train.run_cli(main, presets=PRESETS)
