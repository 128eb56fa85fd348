"""Compare adapters at equal trainable parameters: LoRA, rsLoRA and DoRA come within 0.02 bits per byte.

    python recipes/transformer.py                         # makes the checkpoint to start from, once
    python recipes/compare_adapters.py                    # ten methods at one size: two minutes
    python recipes/compare_adapters.py --methods lora dora full --ranks 1 4 16   # a curve each
    python recipes/compare_adapters.py --checkpoint ~/llama --data ~/books --seq-len 2048 --steps 2000 --fsdp 8

On held-out text, English prose goes in 40 steps from 2.84 to 2.42 bits per byte with LoRA (40,960 parameters), to 2.43
with rsLoRA and DoRA, 2.45 with OLoRA, LoHa and LoKr, 2.49 with VeRA (12,800) and 2.36 with all 886,400.

Each method has the rank at which it has about as many trainable parameters as LoRA at each of `ranks`, and its own
learning rate, swept on the model that transformer.py exports: sweep again for other models or many more steps.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, get_args

import equinox as eqx
import jax

import zoo
from zoo import adapters, tools, train

import optax

START = Path("runs/transformer/export")  # where transformer.py exports its model by default
PROMPTS = ['The "with" statement\n', "An object is ", "When a function is called, "]
Name = Literal["lora", "rslora", "dora", "pissa", "olora", "vera", "loha", "lokr", "ia3", "full"]
METHODS: dict[str, tuple[Callable, float]] = {  # constructor, peak learning rate; the last two have no rank
    "lora": (partial(adapters.lora, alpha=16), 1e-2),
    "rslora": (partial(adapters.lora, alpha=16, rank_stabilized=True), 5e-3),
    "dora": (partial(adapters.dora, alpha=16), 1e-2),
    "pissa": (partial(adapters.lora, init="pissa"), 1e-2),
    "olora": (partial(adapters.lora, init="olora"), 1e-2),
    "vera": (partial(adapters.vera, d_initial=0.1), 1e-1),
    "loha": (adapters.loha, 3e-2),
    "lokr": (partial(adapters.lokr, factor=4), 3e-2),
    "ia3": (adapters.ia3, 3e-1),
    "full": (lambda model, *, key: model, 1e-3),
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
    config, mesh, warmup_steps = dict(locals()), mesh_options.make_mesh(), min(warmup_steps, steps // 2)
    train.check_names("methods", methods, METHODS)
    if not ranks or min(steps, *ranks) < 1 or max_rank < max(ranks):
        raise ValueError(f"{steps=} and each of {ranks=} are at least 1, and {max_rank=} at least the largest of them")
    if not (checkpoint / "config.json").exists():
        raise FileNotFoundError(f"{checkpoint}: no model there; `python recipes/transformer.py` makes one in {START}")
    tokenizer, key = train.read_tokenizer(checkpoint), jax.random.key(run_options.seed)
    corpus, old_corpus = (train.load_text(text, tokenizer=tokenizer) for text in (data or topics, pretraining_data))

    def load():
        return mesh_options.apply(zoo.load(checkpoint, mesh=mesh, dtype="float32"))

    def apply(method, rank, model):
        options = {"targets": targets, "rank": rank} if rank else {}
        return zoo.place(METHODS[method][0](model, key=key, **options), mesh)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, mesh_options.dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state, optimizer):
        scale = train.loss_scale(opt_state)
        loss, grads = zoo.value_and_grad(loss_fn, mesh, **mesh_options.accumulation)(model, batch, loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        metrics = {"bits_per_byte": train.bits_per_byte(loss, corpus.train), "gradient_norm": optax.tree.norm(grads)}
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, metrics

    new, old = (text.validation.ordered(seq_len, batch_size, limit=8) for text in (corpus, old_corpus))
    evaluate, base = train.Evaluation(loss_fn, mesh, new=new, old=old), load()
    before, samples = evaluate(base), train.continue_prompts(base, corpus, PROMPTS, mesh=mesh, key=key)

    @cache
    def size(method, rank):
        return zoo.count(eqx.filter_eval_shape(partial(apply, method, rank), base))

    def find_rank(method, budget):
        return None if method in ("ia3", "full") else adapters.find_rank(partial(size, method), budget, max_rank)

    plan = dict.fromkeys((method, find_rank(method, size("lora", rank))) for method in methods for rank in ranks)
    out, rows, best, merged = run_options.out, [], 0.0, None
    for method, rank in plan:
        name = f"{method}-{rank}" if rank else method
        peak = METHODS[method][1] if learning_rate is None else learning_rate
        schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps, steps, peak / 10))
        adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
        optimizer = mesh_options.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw))
        model = apply(method, rank, load())
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(seq_len, batch_size, seed=run_options.seed, process=zoo.parallel.reader(mesh))
        with train.Run(run_options.subrun(name), config=config | {"run": name}, best_metric="new", frozen=model) as run:
            run.print_line(f"{name}: {zoo.count(model):,} trainable parameters, learning rate {peak:g}")
            trainable, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
            model = eqx.combine(trainable, model)
            for batch in run.steps(batches, steps, tokens=batch_size * seq_len):
                batch = zoo.place_batch(batch, mesh, vocab=corpus.vocab)
                if run.step == 1 and (memory := zoo.inspect.compiled(step, batch, model, opt_state, optimizer).memory):
                    run.log(bytes_held=memory.arguments, bytes_at_work=memory.temporaries)
                model, opt_state, metrics = step(batch, model, opt_state, optimizer)
                run.log(**metrics, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1))
                if run.every(eval_every):  # merged, all methods are one program
                    run.log(**evaluate(model if method == "full" else adapters.merge(model)))
                if run.due(eval_every):
                    run.save((zoo.trainable(model), opt_state), batches)
        batches.close()
        if run.stopped:
            return
        last, count = train.summary(run.directory), zoo.count(model)
        row = {"run": name, "method": method, "rank": str(rank or "none"), "parameters": count}
        row |= {"share": f"{count / zoo.count(base):.2%}", "new": last["new"], "old": last["old"]}
        row |= {"bytes held": last.get("bytes_held", 0), "bytes at work": last.get("bytes_at_work", 0)}
        rows.append(row | {"ms per step": round(last["milliseconds_per_step"])})
        if method != "full":
            adapters.save(model, run.directory / "adapter", base=checkpoint)
            if merged is None or last["new"] < best:
                best, merged = last["new"], adapters.merge(model)
    (out / "results.json").write_text(json.dumps({"before": before, "runs": rows}, indent=2) + "\n", encoding="utf-8")
    if merged is not None:
        samples += train.continue_prompts(merged, corpus, PROMPTS, mesh=mesh, key=key)
        train.export(merged, corpus, out / "export", seq_len=seq_len)
    chart = tools.report.ScatterChart.of_rows(
        rows, "method", x="parameters", values="new", unit="bits per byte", x_label="trainable parameters"
    )
    description = f"Bits per byte after {steps} steps; before: {before['new']:.3f} new, {before['old']:.3f} old"
    tools.report_runs(
        out,
        "Adapters at equal trainable parameters",
        rows,
        description=description,
        curves={},
        samples=samples,
        plots={"Trainable parameters": chart},
        recipe=main,
    )


if __name__ == "__main__":
    train.run_cli(main)
