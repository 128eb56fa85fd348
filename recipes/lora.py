"""Adapt a checkpoint with LoRA, beside training all of it: a tenth of the numbers, nine tenths of the gain.

    python recipes/transformer.py                         # makes the checkpoint to start from, once
    python recipes/lora.py                                # 120 steps of each kind
    python recipes/lora.py --no-compare-full                   # LoRA alone
    python recipes/lora.py --resume                       # after Ctrl-C; on another mesh too
    python recipes/lora.py --checkpoint ~/llama --data ~/books --seq-len 2048 --batch-size 64 --rank 16 --no-compare-full --fsdp 8

On text that was held out, English prose goes from 2.83 to 2.04 bits per byte with LoRA, to 1.96 where all is trained.
Parameters and moments take 4.6 MB in place of 10.7; what the backward pass works in, which LoRA does not save,
outweighs both at this size.

How this differs from finetune.py:

- Around matrices stand adapters, W x + scale B A x (Hu et al., arXiv:2106.09685), and these alone are learnt, at a
  higher rate. A checkpoint holds them and their moments; of all else it holds a fingerprint.
- All parameters are trained first, on the same rows, as a yardstick: each kind is a run of its own, in its own folder.
- It says what is learnt, and what the compiled step keeps on a device, of both.
- What it exports is PEFT's adapter, and the model with the adapter merged. Both are read again and compared.
"""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo import train  # isort: skip  (before optax: it says which command installs what is missing)
import optax

import zoo

START = Path("runs/transformer/export")  # where transformer.py leaves its model unless told otherwise


def main(
    *,
    checkpoint: Path = START,
    data: tuple[Path, ...] = (),
    pretraining_data: tuple[Path, ...] = (),
    targets: tuple[str, ...] = ("all-linear",),
    rank: int = 8,
    alpha: float = 16.0,
    rank_stabilized: bool = False,
    compare_full: bool = True,
    seq_len: int = 128,
    batch_size: int = 16,
    microbatches: int = 1,
    steps: int = 120,
    learning_rate: float = 1e-2,
    full_learning_rate: float = 1e-3,
    warmup_steps: int = 12,
    weight_decay: float = 0.1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    remat: zoo.parallel.Remat = "full",
    fsdp: int = 1,
    tensor: int = 1,
    zero_stage: Literal[1, 3] = 3,
    eval_every: int = 40,
    seed: int = 0,
    out: Path = Path("runs/lora"),
    resume: bool = False,
    profile: bool = False,
) -> None:
    """Load, train all parameters, train an adapter, validate, sample, export, read again.

    Args:
        checkpoint: The directory of the model to start from: config.json, safetensors and tokenizer.json.
        data: Files and folders of new text; Python's language reference, by topic, where there are none.
        pretraining_data: Files and folders of what the model knew, of which the part that is held out is measured; the standard
            library where there are none.
        targets: Matrices that get an adapter: ends of names, patterns, or all-linear for all but the head's.
        rank: Of B A.
        alpha: What B A is scaled with, divided by the rank.
        rank_stabilized: Divide alpha by the root of the rank instead (rsLoRA).
        compare_full: Train all parameters, too.
        seq_len: Tokens in a row.
        batch_size: Rows in a step, on all devices together.
        microbatches: Parts in which a device takes its rows, one after another, to save memory.
        steps: Optimizer steps of each kind.
        learning_rate: Peak of the adapter's learning rate, after warm-up; it falls to a tenth as a cosine does.
        full_learning_rate: That of all parameters.
        warmup_steps: Steps of warm-up.
        weight_decay: Of matrices and embeddings, as in AdamW.
        dtype: What the model computes in; parameters and their updates are float32.
        remat: What the backward pass computes again to save memory.
        fsdp: Devices that share each copy of the parameters.
        tensor: Devices that share each head, MLP and vocabulary. All that remain split the batch.
        zero_stage: With fsdp, 3 splits parameters and optimizer state, 1 the optimizer state alone.
        eval_every: Steps between validations, each with a checkpoint.
        seed: Of the adapter, the order of the text and the samples.
        out: The folder of both runs.
        resume: Go on from the newest checkpoints in `out`; `start` is read all the same.
        profile: Trace a few steps of each run into the folder `profile` of its own.
    """
    config = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    if not (checkpoint / "config.json").exists():
        raise FileNotFoundError(f"{checkpoint}: no model there; `python recipes/transformer.py` makes one in {START}")
    mesh = zoo.make_mesh(fsdp=fsdp, tensor=tensor, layout=zoo.parallel.ZERO1 if zero_stage == 1 else None)
    tokenizer = train.read_tokenizer(checkpoint)
    corpus, known = (
        train.load_text(data or topics, tokenizer=tokenizer),
        train.load_text(pretraining_data, tokenizer=tokenizer),
    )
    texts = {"new": corpus.validation, "old": known.validation}
    held_out = {kind: text.ordered(seq_len, batch_size, limit=16) for kind, text in texts.items()}
    placed = {kind: [zoo.place_batch(rows, mesh) for rows in text] for kind, text in held_out.items()}
    tokens = batch_size * seq_len

    def load(folder):
        return train.rematerialize(zoo.load(folder, mesh=mesh, dtype="float32"), remat)

    def with_adapter(model):
        options = {"targets": targets, "rank": rank, "alpha": alpha, "rank_stabilized": rank_stabilized}
        return zoo.place(zoo.adapters.lora(model, **options, key=jax.random.key(seed)), mesh)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, dtype), batch)

    def validate(model):
        """Bits per byte on held-out text, new and old."""
        bits = {}
        for kind, text in held_out.items():
            losses = jax.device_get([zoo.value(loss_fn, mesh)(model, rows) for rows in placed[kind]])
            mean = np.average(losses, weights=[rows["weights"].sum() for rows in text])
            bits[kind] = float(train.bits_per_byte(float(mean), text))
        return bits

    def learn(name, model, learning_rate):
        """Train what is learnt of a model, in a run of its own; None where that was stopped."""
        warm = min(warmup_steps, steps // 2)
        schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warm, steps, learning_rate / 10)
        adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(seq_len, batch_size, seed=seed)

        @eqx.filter_jit(donate="all-except-first")
        def step(inputs, model, opt_state):
            loss, grads = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches)(model, inputs)
            updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
            bits = train.bits_per_byte(loss, corpus.train)
            return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, bits

        # Forward and back through everything, and once more for the gradients of what is learnt.
        flops = tokens * (4 * parameters + 2 * zoo.count(model))
        places = {"config": config | {"run": name}, "resume": resume, "profile": profile, "frozen": model}
        with train.Run(out / name, **places) as run:
            run.print_line(f"{name}: {zoo.count(model):,} numbers learnt")
            learnt, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
            model = eqx.combine(learnt, model)
            for inputs in run.steps(batches, steps, tokens=tokens, flops=flops):
                inputs = zoo.place_batch(inputs, mesh)
                if run.step == 1 and (memory := zoo.inspect.compiled(step, inputs, model, opt_state).memory):
                    run.log(bytes_held=memory.arguments, bytes_at_work=memory.temporaries)
                model, opt_state, bits = step(inputs, model, opt_state)
                run.log(bits_per_byte=bits)
                measured = validate(model) if run.every(eval_every) else {}
                run.log(**measured)
                if run.due(eval_every):
                    run.save((zoo.trainable(model), opt_state), batches, metric=measured.get("new"))
        batches.close()
        return None if run.stopped else model

    model = load(checkpoint)
    parameters = zoo.count(model)
    numbers = zoo.count(eqx.filter_eval_shape(with_adapter, model))  # what no adapter fits is told before anything runs
    print(f"{parameters:,} parameters from {checkpoint} on {mesh}, {numbers:,} in adapters; {corpus}")
    before, samples = validate(model), sample(model, corpus, mesh, jax.random.key(seed))
    kinds = {"full": (load, full_learning_rate), "lora": (lambda start: with_adapter(load(start)), learning_rate)}
    folders, table = {name: out / name for name in kinds if compare_full or name == "lora"}, []
    for name, folder in folders.items():
        make, rate = kinds[name]
        model = learn(name, make(checkpoint), rate)
        if model is None:
            return
        table.append(summed_up(name, folder, zoo.count(model), parameters))

    zoo.adapters.save(model, out / "adapter")
    merged = zoo.adapters.merge(model)
    exported = train.export(merged, corpus, out / "export", seq_len=seq_len)
    again = zoo.place(zoo.adapters.load(load(checkpoint), out / "adapter"), mesh)
    if not all(map(jnp.array_equal, *(jax.tree.leaves(zoo.trainable(one)) for one in (model, again)))):
        raise RuntimeError(f"{out / 'adapter'}: the adapter that was read again is not the one that was written")
    logits = zoo.spmd(lambda model, rows: model(rows["tokens"]), mesh, out="batch seq vocab")
    wanted, *found = (logits(one, placed["new"][0]) for one in (model, again, load(exported)))
    apart = max(float(jnp.abs(one - wanted).max() / jnp.abs(wanted).max()) for one in found)
    if apart > 0.01:
        raise RuntimeError(f"{out}: logits of the adapter read again, or of the merged model, are {apart:.1%} away")

    samples_after, last = sample(merged, corpus, mesh, jax.random.key(seed)), table[-1]
    moved = {f"{kind} text": f"{before[kind]:.3f} → {last[f'{kind} text']:.3f}" for kind in held_out}
    result = ", ".join(f"{text.replace('→', 'to')} on the {kind}" for kind, text in moved.items())
    report = train.write_report(
        out,
        title="LoRA on new text",
        summary=f"Bits per byte on held-out text after {steps} steps on {mesh}: {result}; {last['share']} learnt",
        runs=folders,
        curves={"new": "new text", "old": "old text"},
        baselines={"xz -9e, new text": corpus.xz_bits_per_byte},
        unit="bits per byte",
        headline=moved | {"learnt": last["share"]},
        tables={"In the end": table},
        samples=samples + samples_after,
        parameters=train.tabulate_parameters(zoo.trainable(model), mesh),
    )
    print(f"\nbefore: {''.join(samples[0])}\n\nafter: {''.join(samples_after[0])}\n\nbits per byte: {result}")
    for row in table:
        print(f"{row['run']:>8}: " + ", ".join(f"{name} {row[name]:.3f}" for name in moved), end="; ")
        print(f"{row['numbers']:,} learnt; bytes: {row['bytes held']:,} held, {row['bytes at work']:,} at work")
    print(f"the adapter lies in {out / 'adapter'} and was read again bit for bit; merged, it lies in {exported}, whose")
    print(f"logits are within {apart:.1e} of the largest; the report lies in {report}")


def summed_up(name, folder, count, parameters):
    """What a run came to, from its folder: what its step holds, parameters, moments and rows, and what it works in."""
    last = {name: value for line in train.read_metrics(folder / "metrics.jsonl") for name, value in line.items()}
    speeds = [line.get("steps_per_second") for line in train.read_metrics(folder / "timing.jsonl")]
    return {
        "run": name,
        "numbers": count,
        "share": f"{count / parameters:.2%}",
        "new text": last["new"],
        "old text": last["old"],
        "bytes held": last.get("bytes_held", 0),
        "bytes at work": last.get("bytes_at_work", 0),
        "ms a step": round(1000 / float(np.median([speed for speed in speeds if speed] or [np.inf]))),
    }


def sample(model, corpus, mesh, key):
    """Continue a few beginnings: (prompt, continuation) pairs."""
    prompts = ['The "with" statement\n', "An object is ", "When a function is called, "]
    begun = [np.append(corpus.tokenizer.separator, corpus.encode(prompt)) for prompt in prompts]
    width = max(map(len, begun))
    tokens = jnp.asarray([np.pad(row, (width - len(row), 0)) for row in begun])
    mask = jnp.asarray([np.arange(width) >= width - len(row) for row in begun])
    new = zoo.generate(model, tokens, max_new_tokens=200, mask=mask, temperature=0.7, mesh=mesh, key=key)
    return [(prompt, corpus.decode(row)) for prompt, row in zip(prompts, new, strict=True)]


if __name__ == "__main__":
    train.run_cli(main)
