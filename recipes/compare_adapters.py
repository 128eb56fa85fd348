"""Compare ways to adapt a model at equal numbers learnt: LoRA, rsLoRA and DoRA come within 0.02 bits per byte.

    python recipes/transformer.py                         # makes the checkpoint to start from, once
    python recipes/compare_adapters.py                   # ten methods at one size: two minutes
    python recipes/compare_adapters.py --methods lora dora full --ranks 1 4 16   # a curve each
    python recipes/compare_adapters.py --resume          # after Ctrl-C: what is complete is read back
    python recipes/compare_adapters.py --checkpoint ~/llama --data ~/books --seq-len 2048 --batch-size 64 --steps 2000 --fsdp 8

On text that was held out, English prose goes in 40 steps from 2.84 to 2.42 bits per byte with LoRA (40,960 numbers),
to 2.43 with rsLoRA and DoRA, 2.45 with OLoRA, LoHa and LoKr, 2.49 with VeRA (12,800) and 2.36 where all 886,400 are
trained.

How this differs from lora.py:

- A method's ranks are its own: those at which it learns about as many numbers as LoRA does at each of `ranks`. They
  are searched on shapes alone. A method that cannot be so large, or so small, is as near as it gets; IA3 and full
  training have one size.
- Each method has a rate of its own, the better of a few tries on the model that transformer.py leaves: another model,
  or many more steps, want others, and a table of one rate a method is no verdict on methods.
- Each run is short and has a folder of its own, with PEFT's adapter in it. What is compared is one table, one JSON file
  and one picture; of the best adapter alone there are samples, and the model with it merged.
"""

import bisect
import functools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo import train  # isort: skip  (before optax: it says which command installs what is missing)
import optax

import zoo
from zoo import adapters

START = Path("runs/transformer/export")  # where transformer.py leaves its model unless told otherwise
Name = Literal["lora", "rslora", "dora", "pissa", "olora", "vera", "loha", "lokr", "ia3", "full"]


class Method(NamedTuple):
    """How a model is made ready, and how fast it is then trained."""

    make: Callable | None
    """Called with the model, targets=, key= and, unless it has one size, rank=. None for all parameters."""
    learning_rate: float
    one_size: bool = False


def ia3(model, *, targets, key):
    """On keys, values and what leads out of feed-forward layers, whatever the targets of the others are."""
    return adapters.ia3(model, key=key)


METHODS: dict[Name, Method] = {
    "lora": Method(partial(adapters.lora, alpha=16), 1e-2),
    "rslora": Method(partial(adapters.lora, alpha=16, rank_stabilized=True), 5e-3),
    "dora": Method(partial(adapters.dora, alpha=16), 1e-2),
    "pissa": Method(partial(adapters.lora, init="pissa"), 1e-2),
    "olora": Method(partial(adapters.lora, init="olora"), 1e-2),
    "vera": Method(partial(adapters.vera, d_initial=0.1), 1e-1),
    "loha": Method(adapters.loha, 3e-2),
    "lokr": Method(partial(adapters.lokr, factor=4), 3e-2),
    "ia3": Method(ia3, 3e-1, one_size=True),
    "full": Method(None, 1e-3, one_size=True),
}


def main(
    *,
    methods: tuple[Name, ...] = tuple(METHODS),
    ranks: tuple[int, ...] = (4,),
    max_rank: int = 256,
    checkpoint: Path = START,
    data: tuple[Path, ...] = (),
    pretraining_data: tuple[Path, ...] = (),
    targets: tuple[str, ...] = ("all-linear",),
    seq_len: int = 128,
    batch_size: int = 8,
    microbatches: int = 1,
    steps: int = 40,
    learning_rate: float | None = None,
    warmup_steps: int = 5,
    weight_decay: float = 0.1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    remat: zoo.parallel.Remat = "none",
    fsdp: int = 1,
    tensor: int = 1,
    zero_stage: Literal[1, 3] = 3,
    eval_every: int = 40,
    seed: int = 0,
    out: Path = Path("runs/compare_adapters"),
    resume: bool = False,
    profile: bool = False,
) -> None:
    """Search sizes, train one after another, compare; read the best adapter again, merge, sample, export.

    Args:
        methods: Which ones.
        ranks: Of LoRA, each of which sets a size that the other methods come near.
        max_rank: The largest rank that is searched.
        checkpoint: The directory of the model to start from: config.json, safetensors and tokenizer.json.
        data: Files and folders of new text; Python's language reference, by topic, where there are none.
        pretraining_data: Files and folders of what the model knew, of which the part that is held out is measured; the standard
            library where there are none.
        targets: Matrices that get an adapter: ends of names, patterns, or all-linear for all but the head's.
        seq_len: Tokens in a row.
        batch_size: Rows in a step, on all devices together.
        microbatches: Parts in which a device takes its rows, one after another, to save memory.
        steps: Optimizer steps of each run.
        learning_rate: Peak of the learning rate of all methods; each has its own unless given.
        warmup_steps: Steps of warm-up.
        weight_decay: Of matrices and embeddings, as in AdamW.
        dtype: What models compute in; parameters and their updates are float32.
        remat: What the backward pass computes again to save memory.
        fsdp: Devices that share each copy of the parameters.
        tensor: Devices that share each head, MLP and vocabulary. All that remain split the batch.
        zero_stage: With fsdp, 3 splits parameters and optimizer state, 1 the optimizer state alone.
        eval_every: Steps between validations, each with a checkpoint.
        seed: Of the adapters and the order of the text.
        out: The folder of all runs.
        resume: Go on from the newest checkpoints in `out`; `start` is read all the same.
        profile: Trace a few steps of each run into the folder `profile` of its own.
    """
    config = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    if not methods or set(methods) - METHODS.keys():
        raise ValueError(f"name one or more of the methods {', '.join(METHODS)}, not {', '.join(methods) or 'none'}")
    if not ranks or min(steps, *ranks) < 1 or max_rank < max(ranks):
        raise ValueError(f"{steps=} and each of {ranks=} are at least 1, and {max_rank=} at least the largest of them")
    if not (checkpoint / "config.json").exists():
        raise FileNotFoundError(f"{checkpoint}: no model there; `python recipes/transformer.py` makes one in {START}")
    mesh = zoo.make_mesh(fsdp=fsdp, tensor=tensor, layout=zoo.parallel.ZERO1 if zero_stage == 1 else None)
    tokenizer = train.read_tokenizer(checkpoint)
    corpus, known = (
        train.load_text(data or topics, tokenizer=tokenizer),
        train.load_text(pretraining_data, tokenizer=tokenizer),
    )
    texts = {"new": corpus.validation, "old": known.validation}
    held_out = {kind: text.ordered(seq_len, batch_size, limit=8) for kind, text in texts.items()}
    placed = {kind: [zoo.place_batch(rows, mesh) for rows in text] for kind, text in held_out.items()}
    tokens = batch_size * seq_len

    def load(folder):
        return train.rematerialize(zoo.load(folder, mesh=mesh, dtype="float32"), remat)

    def made(method, rank, model):
        make, _, one_size = METHODS[method]
        if make is None:
            return model
        size = {} if one_size else {"rank": rank}
        return zoo.place(make(model, targets=targets, key=jax.random.key(seed), **size), mesh)

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

    def learn(name, method, model):
        """Train what is learnt of a model, in a run of its own, and write its adapter. Whether it got to the end."""
        rate, warm = (
            METHODS[method].learning_rate if learning_rate is None else learning_rate,
            min(warmup_steps, steps // 2),
        )
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warm, steps, rate / 10)
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

        flops = tokens * (4 * parameters + 2 * zoo.count(model))  # the base's gradients are not computed
        places = {"config": config | {"run": name}, "resume": resume, "profile": profile, "frozen": model}
        with train.Run(out / name, **places) as run:
            run.print_line(f"{name}: {zoo.count(model):,} numbers learnt at a rate of {rate:g}")
            learnt, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
            model = eqx.combine(learnt, model)
            for inputs in run.steps(batches, steps, tokens=tokens, flops=flops):
                inputs = zoo.place_batch(inputs, mesh)
                if run.step == 1 and (memory := zoo.inspect.compiled(step, inputs, model, opt_state).memory):
                    run.log(bytes_held=memory.arguments, bytes_at_work=memory.temporaries)
                model, opt_state, bits = step(inputs, model, opt_state)
                run.log(bits_per_byte=bits)
                # Merged, all methods are one program.
                plain = adapters.merge(model) if run.every(eval_every) and method != "full" else model
                measured = validate(plain) if run.every(eval_every) else {}
                run.log(**measured)
                if run.due(eval_every):
                    run.save((zoo.trainable(model), opt_state), batches, metric=measured.get("new"))
        batches.close()
        if not run.stopped and method != "full":
            adapters.save(model, out / name / "adapter")
        return not run.stopped

    model = load(checkpoint)
    parameters, before = zoo.count(model), validate(model)
    sizes = {method: functools.cache(partial(size, model, partial(made, method))) for method in methods}
    lora = partial(size, model, partial(made, "lora"))
    budgets = [lora(rank) for rank in ranks]
    runs = {}
    for method in methods:
        for budget in budgets:
            rank = 1 if METHODS[method].one_size else nearest(sizes[method], budget, max_rank)
            runs[method if METHODS[method].one_size else f"{method}-{rank}"] = method, rank
    print(
        f"{parameters:,} parameters from {checkpoint} on {mesh}; {len(runs)} runs near {budgets} numbers learnt; {corpus}"
    )

    samples, table = sample(model, corpus, mesh, jax.random.key(seed)), []
    for name, (method, rank) in runs.items():
        if not learn(name, method, made(method, rank, load(checkpoint))):
            return
        about = {"run": name, "method": method, "rank": "none" if METHODS[method].one_size else str(rank)}
        table.append(about | summed_up(out / name, sizes[method](rank), parameters))

    if adapted := [row for row in table if row["method"] != "full"]:
        chosen = min(adapted, key=lambda row: row["new text"])
        folder = out / chosen["run"] / "adapter"
        merged = adapters.merge(zoo.place(adapters.load(load(checkpoint), folder), mesh))
        exported = train.export(merged, corpus, out / "export", seq_len=seq_len)
        found = validate(load(exported))["new"]
        if abs(found - chosen["new text"]) > 1e-3:
            raise RuntimeError(f"{folder}: read again and merged, it has {found:.3f} bits per byte on the new text")
        samples_after = sample(merged, corpus, mesh, jax.random.key(seed))
        print(f"\nbefore: {''.join(samples[0])}\n\nafter, {chosen['run']}: {''.join(samples_after[0])}\n")
        samples += samples_after

    (out / "results.json").write_text(json.dumps({"before": before, "runs": table}, indent=2) + "\n", encoding="utf-8")

    def of(method, column):
        return [row[column] for row in table if row["method"] == method]

    groups = [train.ScatterSeries(method, of(method, "numbers"), of(method, "new text")) for method in methods]
    draw = partial(train.draw_scatter, groups, unit="bits per byte", x_label="numbers learnt")
    best = min(table, key=lambda row: row["new text"])
    report = train.write_report(
        out,
        title="Ways to adapt a model",
        summary=f"Bits per byte on new text after {steps} steps of {batch_size} rows, {before['new']:.3f} before",
        runs={name: out / name for name in runs},
        curves={},
        unit="bits per byte",
        headline={"before": f"{before['new']:.3f}", f"{best['method']}, {best['share']}": f"{best['new text']:.3f}"},
        tables={"In the end": table},
        plots={"What is learnt, and what it brings": draw},
        samples=samples,
    )
    print(f"{'before':>8}{'':35} new {before['new']:.3f}, old {before['old']:.3f}")
    for row in table:
        print(
            f"{row['method']:>8}, rank {row['rank']:>4}: {row['numbers']:>9,} ({row['share']:>7}) "
            f"new {row['new text']:.3f}, old {row['old text']:.3f}; {row['ms a step']:>5} ms a step; bytes: "
            f"{row['bytes held']:,} held, {row['bytes at work']:,} at work"
        )
    print(f"the table lies in {out / 'results.json'}, the report in {report}")
    if adapted:
        print(f"adapters lie in the runs' folders; {chosen['run']}, the best, was read again; merged: {exported}")


def size(model, make, rank):
    """How many numbers a method learns of a model, from shapes alone."""
    return zoo.count(eqx.filter_eval_shape(partial(make, rank), model))


def nearest(size_of, budget, largest):
    """The rank of the size that is nearest to a budget. Sizes grow with ranks, and no rank far beyond is tried."""
    high = 1
    while size_of(high) < budget and high < largest:
        high = min(2 * high, largest)
    tried = range(1, high + 1)
    above = bisect.bisect_left(tried, budget, key=size_of)
    return min(tried[max(above - 1, 0) : above + 1], key=lambda rank: abs(size_of(rank) - budget))


def summed_up(folder, count, parameters):
    """What a run came to, from its folder: what its step holds, parameters, moments and rows, and what it works in."""
    last = {name: value for line in train.read_metrics(folder / "metrics.jsonl") for name, value in line.items()}
    speeds = [line.get("steps_per_second") for line in train.read_metrics(folder / "timing.jsonl")]
    return {
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
