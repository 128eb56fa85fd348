"""Teach a small Mamba the Python standard library: 300 steps, a minute and a half on two cores, 2.1 bits per byte.

    python recipes/mamba.py                               # Mamba-2, this machine's own library, byte by byte
    python recipes/mamba.py --generation 1                # the first Mamba, whose every channel has decays of its own
    python recipes/mamba.py --resume                      # after Ctrl-C; on another mesh too
    python recipes/mamba.py 1b --fsdp 8 --data /data/text

As recipes/transformer.py, on the same text in the same order, but for this: there is no attention and no MLP, a layer
is one mixer that widens the stream itself; and what a text leaves to remember does not grow with it, which the report
says in bytes. A run's folder gets its configuration, metrics and checkpoints and, at the end, report.html and export/:
the model and its tokens as a Hugging Face directory.
"""

from functools import partial
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
        "vocab": 32768, "embed": 2048, "layers": 48, "state": 128, "head_dim": 64, "seq_len": 4096, "batch_size": 64,
        "steps": 20_000, "learning_rate": 4e-4, "warmup_steps": 1000, "dtype": "bfloat16", "remat": "dots",
    },
}  # fmt: skip


def main(
    *,
    generation: Literal[1, 2] = 2,
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 128,
    layers: int = 4,
    state: int = 32,
    head_dim: int = 32,
    expand: int = 2,
    seq_len: int = 128,
    batch_size: int = 16,
    microbatches: int = 1,
    steps: int = 300,
    learning_rate: float = 4e-3,
    warmup_steps: int = 30,
    weight_decay: float = 0.1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    remat: zoo.parallel.Remat = "elementwise",
    fsdp: int = 1,
    tensor: int = 1,
    eval_every: int = 100,
    seed: int = 0,
    out: Path = Path("runs/mamba"),
    resume: bool = False,
    profile: bool = False,
) -> None:
    """Train, validate, sample, report.

    Args:
        generation: Mamba or Mamba-2.
        data: Files and folders of text; this Python's standard library where there are none.
        vocab: 256 for bytes; more for byte pairs, learnt from the text on the spot.
        embed: Width of the residual stream.
        layers: Number of blocks.
        state: Numbers that a channel remembers.
        head_dim: Channels of a head, which share their decays; of Mamba-2.
        expand: Channels of a mixer, as a multiple of embed.
        seq_len: Tokens in a row.
        batch_size: Rows in a step, on all devices together.
        microbatches: Parts in which a device takes its rows, one after another, to save memory.
        steps: Optimizer steps.
        learning_rate: Peak of the learning rate, after warm-up; it falls to a tenth as a cosine does.
        warmup_steps: Steps of warm-up.
        weight_decay: Of matrices and embeddings, as in AdamW.
        dtype: What the model computes in; parameters and their updates are float32, and so are states and decays.
        remat: What the backward pass computes again to save memory.
        fsdp: Devices that share each copy of the parameters.
        tensor: Devices that share the channels of each layer and the vocabulary. All that remain split the batch.
        eval_every: Steps between validations, each with a checkpoint.
        seed: Of parameters, the order of the text and the samples.
        out: The run's folder.
        resume: Go on from the newest checkpoint in `out`.
        profile: Trace a few steps into the folder `profile` of `out`, for Perfetto, XProf and TensorBoard.
    """
    config = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    if generation not in (1, 2):
        raise ValueError(f"there is a Mamba and a Mamba-2, and generation={generation} is neither")
    mesh = zoo.make_mesh(fsdp=fsdp, tensor=tensor)
    corpus = train.load_text(data, vocab=vocab)
    batches = corpus.train.batches(seq_len, batch_size, seed=seed)
    held_out = corpus.validation.ordered(seq_len, batch_size, limit=16)
    placed = [zoo.place_batch(rows, mesh) for rows in held_out]

    def make(key):
        of_generation = zoo.models.Mamba if generation == 1 else partial(zoo.models.Mamba2, head_dim=head_dim)
        sized = partial(of_generation, vocab=corpus.vocab, embed=embed, layers=layers, state=state, expand=expand)
        return sized(remat=remat, key=key)

    model_key, sample_key = jax.random.split(jax.random.key(seed))
    model = zoo.init(make, model_key, mesh)

    warmup_steps = min(warmup_steps, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, train.bits_per_byte(loss, corpus.train)

    def validate(model):
        losses = jax.device_get([zoo.value(loss_fn, mesh)(model, rows) for rows in placed])
        mean = np.average(losses, weights=[rows["weights"].sum() for rows in held_out])
        return float(train.bits_per_byte(float(mean), held_out))

    tokens, validation = batch_size * seq_len, None
    with train.Run(out, config=config, resume=resume, profile=profile) as run:
        run.print_line(f"{zoo.count(model):,} parameters on {mesh}; {corpus}")
        model, opt_state = run.restore((model, opt_state), batches)
        for inputs in run.steps(batches, steps, tokens=tokens, flops=6 * tokens * zoo.count(model)):
            model, opt_state, bits = step(zoo.place_batch(inputs, mesh), model, opt_state)
            run.log(bits_per_byte=bits)
            validation = validate(model) if run.every(eval_every) else None
            if validation is not None:
                run.log(validation=validation)
            if run.due(eval_every):
                run.save((model, opt_state), batches, metric=validation)

    if run.stopped:
        return
    validation = validate(model) if validation is None else validation  # None: it was complete when it was resumed
    samples = sample(model, corpus, mesh, sample_key)
    exported = train.export(model, corpus, out / "export", seq_len=seq_len)
    report = train.write_report(
        out,
        title=f"A Mamba{'-2' * (generation == 2)} from scratch",
        summary=f"{validation:.3f} bits per byte on held-out text after {steps} steps on {mesh}",
        curves={"bits_per_byte": "training", "validation": "validation"},
        baselines={"xz -9e": corpus.xz_bits_per_byte},
        unit="bits per byte",
        headline={
            "bits per byte": f"{validation:.3f}",
            "parameters": f"{zoo.count(model):,}",
            "bytes to remember, however long the text": f"{zoo.inspect.state_bytes(model, 1):,}",
        },
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
