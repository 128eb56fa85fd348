"""Compare adapters at equal trainable parameters: LoRA, rsLoRA and DoRA come within 0.02 bits per byte.

    python recipes/transformer.py                         # makes the checkpoint to start from, once
    python recipes/compare_adapters.py                    # ten methods at one size: two minutes
    python recipes/compare_adapters.py --methods lora dora full --ranks 1 4 16   # a curve each
    python recipes/compare_adapters.py --resume           # after Ctrl-C: complete runs are kept
    python recipes/compare_adapters.py --checkpoint ~/llama --data ~/books --seq-len 2048 --steps 2000 --fsdp 8

On held-out text, English prose goes in 40 steps from 2.84 to 2.42 bits per byte with LoRA (40,960 parameters), to 2.43
with rsLoRA and DoRA, 2.45 with OLoRA, LoHa and LoKr, 2.49 with VeRA (12,800) and 2.36 with all 886,400.

The rank of each method is the one at which it has about as many trainable parameters as LoRA at each of `ranks`, found
from shapes alone. Each method has its own learning rate, the better of a few on the model that transformer.py exports:
sweep them again for other models or many more steps. Every run's directory holds its adapter, for PEFT.
"""

import bisect
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, NamedTuple, get_args

import equinox as eqx
import jax

import zoo
from zoo import adapters, train

import optax

START = Path("runs/transformer/export")  # where transformer.py exports its model by default
PROMPTS = ['The "with" statement\n', "An object is ", "When a function is called, "]
Name = Literal["lora", "rslora", "dora", "pissa", "olora", "vera", "loha", "lokr", "ia3", "full"]


class Method(NamedTuple):
    """Constructor of an adapter, and its peak learning rate."""

    apply: Callable | None
    """Called with the model, key= and, unless it has one size, targets= and rank=. None trains all parameters."""
    learning_rate: float
    one_size: bool = False


METHODS: dict[Name, Method] = {
    "lora": Method(partial(adapters.lora, alpha=16), 1e-2),
    "rslora": Method(partial(adapters.lora, alpha=16, rank_stabilized=True), 5e-3),
    "dora": Method(partial(adapters.dora, alpha=16), 1e-2),
    "pissa": Method(partial(adapters.lora, init="pissa"), 1e-2),
    "olora": Method(partial(adapters.lora, init="olora"), 1e-2),
    "vera": Method(partial(adapters.vera, d_initial=0.1), 1e-1),
    "loha": Method(adapters.loha, 3e-2),
    "lokr": Method(partial(adapters.lokr, factor=4), 3e-2),
    "ia3": Method(adapters.ia3, 3e-1, one_size=True),
    "full": Method(None, 1e-3, one_size=True),
}


def main(
    *,
    methods: tuple[Name, ...] = get_args(Name),
    ranks: tuple[int, ...] = (4,),
    max_rank: int = 256,
    checkpoint: Path = START,
    data: tuple[Path, ...] = (),
    pretraining_data: tuple[Path, ...] = (),
    targets: tuple[str, ...] = ("all-linear",),
    seq_len: int = 128,
    batch_size: int = 8,
    steps: int = 40,
    learning_rate: float | None = None,
    warmup_steps: int = 5,
    weight_decay: float = 0.1,
    eval_every: int = 40,
    mesh_options: train.MeshOptions = train.MeshOptions(remat="none"),
    run_options: train.RunOptions = train.RunOptions(Path("runs/compare_adapters")),
) -> None:
    """Search ranks, train each method, compare; merge and export the best adapter.

    Args:
        methods: Names of methods.
        ranks: LoRA's ranks, each of which sets a number of trainable parameters for the other methods.
        max_rank: Largest rank of the search.
        checkpoint: Directory of the model to start from: config.json, safetensors and tokenizer.json.
        data: Files and directories of new text; by default Python's language reference, by topic.
        pretraining_data: Text as the model was trained on, to measure forgetting; by default the standard library.
        targets: Linear layers to adapt: ends of names, patterns, or all-linear for all but the head. IA3 has its own.
        seq_len: Tokens per sequence.
        batch_size: Sequences per step, over all devices.
        steps: Optimizer steps of each run.
        learning_rate: Peak learning rate of all methods, after linear warmup; by default each has its own.
        warmup_steps: Steps of linear warmup, at most half of all.
        weight_decay: AdamW's, of matrices and embeddings.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, mesh = dict(locals()), mesh_options.make_mesh()
    if not methods or set(methods) - METHODS.keys():
        raise ValueError(f"name one or more of the methods {', '.join(METHODS)}, not {', '.join(methods) or 'none'}")
    if not ranks or min(steps, *ranks) < 1 or max_rank < max(ranks):
        raise ValueError(f"{steps=} and each of {ranks=} are at least 1, and {max_rank=} at least the largest of them")
    if not (checkpoint / "config.json").exists():
        raise FileNotFoundError(f"{checkpoint}: no model there; `python recipes/transformer.py` makes one in {START}")
    tokenizer, key = train.read_tokenizer(checkpoint), jax.random.key(run_options.seed)
    corpus, old_corpus = (train.load_text(text, tokenizer=tokenizer) for text in (data or topics, pretraining_data))

    def load():
        return train.rematerialize(zoo.load(checkpoint, mesh=mesh, dtype="float32"), mesh_options.remat)

    def apply(method, rank, model):
        method = METHODS[method]
        options = {} if method.one_size else {"targets": targets, "rank": rank}
        return zoo.place(method.apply(model, key=key, **options), mesh) if method.apply else model

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, mesh_options.dtype), batch)

    new, old = (text.validation.ordered(seq_len, batch_size, limit=8) for text in (corpus, old_corpus))
    evaluate = train.Evaluation(loss_fn, mesh, new=new, old=old)

    def train_adapter(method, model, run_options):
        """Train the trainable parameters of a model in a run of its own; return the run and the trained model."""
        peak = METHODS[method].learning_rate if learning_rate is None else learning_rate
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, min(warmup_steps, steps // 2), steps, peak / 10)
        adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(seq_len, batch_size, seed=run_options.seed)

        @eqx.filter_jit(donate="all-except-first")
        def step(batch, model, opt_state):
            loss, grads = zoo.value_and_grad(loss_fn, mesh, microbatches=mesh_options.microbatches)(model, batch)
            updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
            bits = train.bits_per_byte(loss, corpus.train)
            return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, bits

        run_config = config | {"run": run_options.out.name}
        with train.Run(run_options, config=run_config, best_metric="new", frozen=model) as run:
            run.print_line(f"{run_options.out.name}: {zoo.count(model):,} trainable parameters, learning rate {peak:g}")
            trainable, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
            model = eqx.combine(trainable, model)
            for batch in run.steps(batches, steps, tokens=batch_size * seq_len):
                batch = zoo.place_batch(batch, mesh)
                if run.step == 1 and (memory := zoo.inspect.compiled(step, batch, model, opt_state).memory):
                    run.log(bytes_held=memory.arguments, bytes_at_work=memory.temporaries)
                model, opt_state, bits = step(batch, model, opt_state)
                run.log(bits_per_byte=bits)
                if run.every(eval_every):  # merged, all methods are one program
                    run.log(**evaluate(model if method == "full" else adapters.merge(model)))
                if run.due(eval_every):
                    run.save((zoo.trainable(model), opt_state), batches)
        batches.close()
        return run, model

    base = load()
    before, samples = evaluate(base), train.continue_prompts(base, corpus, PROMPTS, mesh=mesh, key=key)

    @cache
    def size(method, rank):
        return zoo.count(eqx.filter_eval_shape(partial(apply, method, rank), base))

    rows, best_row = [], None
    budgets = [size("lora", rank) for rank in ranks]
    plan: dict[tuple[Name, int], None] = {
        (m, 1 if METHODS[m].one_size else nearest(partial(size, m), n, max_rank)): None
        for m in methods
        for n in budgets
    }
    for method, rank in plan:
        name = method if METHODS[method].one_size else f"{method}-{rank}"
        run, model = train_adapter(method, apply(method, rank, load()), run_options.subrun(name))
        if run.stopped:
            return
        last, count = train.summary(run.directory), zoo.count(model)
        row = {"run": name, "method": method, "rank": name.removeprefix(method).lstrip("-") or "none"}
        row |= {"parameters": count, "share": f"{count / zoo.count(base):.2%}", "new": last["new"], "old": last["old"]}
        row |= {"bytes held": last.get("bytes_held", 0), "bytes at work": last.get("bytes_at_work", 0)}
        rows.append(row | {"ms per step": round(last["milliseconds_per_step"])})
        if method != "full":
            adapters.save(model, run.directory / "adapter")
            if best_row is None or rows[-1]["new"] < best_row["new"]:
                best_row, merged = rows[-1], adapters.merge(model)
    results = {"before": before, "runs": rows}
    (run_options.out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if best_row is not None:
        samples += train.continue_prompts(merged, corpus, PROMPTS, mesh=mesh, key=key)
        train.export(merged, corpus, run_options.out / "export", seq_len=seq_len)
    series = []
    for method in methods:
        points = [(row["parameters"], row["new"]) for row in rows if row["method"] == method]
        series.append(train.ScatterSeries(method, *zip(*points, strict=True)))
    draw = partial(train.draw_scatter, series, unit="bits per byte", x_label="trainable parameters")
    report = {"curves": {}, "unit": "bits per byte", "samples": samples, "plots": {"Trainable parameters": draw}}
    report["description"] = (
        f"Bits per byte after {steps} steps; before: {before['new']:.3f} new, {before['old']:.3f} old"
    )
    train.report_runs(run_options.out, "Adapters at equal trainable parameters", rows, **report)


def nearest(size_of, budget, max_rank):
    """The rank whose size is nearest to a budget. Sizes grow with ranks, and no rank far beyond is tried."""
    high = 1
    while size_of(high) < budget and high < max_rank:
        high = min(2 * high, max_rank)
    ranks = range(1, high + 1)
    above = bisect.bisect_left(ranks, budget, key=size_of)
    return min(ranks[max(above - 1, 0) : above + 1], key=lambda rank: abs(size_of(rank) - budget))


if __name__ == "__main__":
    train.run_cli(main)
