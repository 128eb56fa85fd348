"""Compare adapters at equal trainable parameters: LoRA, rsLoRA and DoRA come within 0.02 bits per byte.

    python recipes/transformer.py                         # makes the checkpoint to start from, once
    python recipes/compare_adapters.py                    # ten methods at one size: two minutes
    python recipes/compare_adapters.py --methods lora dora full --ranks 1 4 16   # a curve each
    python recipes/compare_adapters.py --checkpoint ~/llama --data ~/books --seq-len 2048 --steps 2000 --fsdp 8

On held-out text, English prose goes in 40 steps from 2.84 to 2.42 bits per byte with LoRA (40,960 parameters), to 2.43
with rsLoRA and DoRA, 2.45 with OLoRA, LoHa and LoKr, 2.49 with VeRA (12,800) and 2.36 with all 886,400.

Each method has the rank at which it has about as many trainable parameters as LoRA at each of `ranks`, and its own
learning rate, swept on the model that transformer.py exports: sweep again for other models or many more steps. The last
section of the report measures how far the rows of each matrix turn and how far they grow, as DoRA's paper does (Liu et
al., arXiv:2402.09353, section 3.2).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import zoo
from zoo import adapters, tools, train
from zoo.models.targets import find_linears

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
MEASURED = ("lora", "dora", "full")  # the methods whose rows DoRA's paper compares


@dataclass(frozen=True)
class Config(train.TextConfig):  # batch_size, steps, learning_rate, ..., data, seq_len
    """Search ranks, train each method, compare; merge and export the best adapter."""

    methods: tuple[Name, ...] = get_args(Name)  # Names of methods.
    # LoRA's ranks, each of which sets a number of trainable parameters for the other methods.
    ranks: tuple[int, ...] = (4,)
    max_rank: int = 256  # Largest rank of the search.
    # Model to start from: a Hugging Face directory, or a name on the hub, NAME[@REVISION].
    checkpoint: Path = Path("runs/transformer/export")
    data: tuple[Path, ...] = ()
    """Files and directories of new text; by default Python's language reference, by topic."""
    # Text as the model was trained on, to measure forgetting; by default the standard library.
    pretraining_data: tuple[Path, ...] = ()
    # Linear layers to adapt: ends of names, patterns, or all-linear for all but the head. IA3 has its own.
    targets: tuple[str, ...] = ("all-linear",)
    batch_size: int = 8
    steps: int = 40
    learning_rate: float | None = None
    """Peak learning rate of all methods, after linear warmup; by default each has its own."""
    warmup_steps: int = 5
    eval_every: int = 40
    mesh: train.MeshOptions = train.MeshOptions(remat="none")
    run: train.RunOptions = train.RunOptions(Path("runs/compare_adapters"))


def adapt(config, mesh, method, rank, model):
    """Return the model with the adapters of a method, or the model itself for full training."""
    adapter, _ = METHODS[method]
    key = jax.random.key(config.run.seed)
    if rank is None:
        return zoo.place(adapter(model, key=key), mesh)
    return zoo.place(adapter(model, targets=config.targets, rank=rank, key=key), mesh)


def find_ranks(config, mesh, base):
    """Return pairs of a method and the rank at which it has as many parameters as LoRA has at one of `ranks`."""

    @cache
    def count_trainable(method, rank):
        return zoo.count(eqx.filter_eval_shape(partial(adapt, config, mesh, method, rank), base))

    pairs = []
    for method in config.methods:
        for budget in [count_trainable("lora", rank) for rank in config.ranks]:
            rank = None
            if method not in ("ia3", "full"):
                rank = adapters.find_rank(partial(count_trainable, method), budget, config.max_rank)
            pairs.append((method, rank))
    return list(dict.fromkeys(pairs))


def train_method(config, mesh, corpus, evaluate, loss_fn, model, method, name):
    """Train a model with adapters, in a run of its own; return it and the run."""
    _, own_rate = METHODS[method]
    peak = own_rate if config.learning_rate is None else config.learning_rate
    schedule = train.warmup_cosine(peak, config.warmup_steps, config.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        metrics = {"bits_per_byte": train.bits_per_byte(loss, corpus.train), "gradient_norm": optax.tree.norm(grads)}
        return model, opt_state, metrics

    with train.Run(config, name=name, mesh=mesh, data=corpus, model=model, best_metric="new", frozen=model) as run:
        trainable, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
        model = eqx.combine(trainable, model)
        for batch in run.steps(batches, config.steps):
            if run.step == 1:
                memory = zoo.inspect.compiled(step, batch, model, opt_state).memory
                if memory is not None:
                    run.log(bytes_held=memory.arguments, bytes_at_work=memory.temporaries)
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(merge(method, model)))  # merged, all methods are one program
            if run.due(config.eval_every):
                run.save((zoo.trainable(model), opt_state), batches)
    batches.close()
    return model, run


def main(config: Config) -> None:
    train.check_names("methods", config.methods, METHODS)
    if not config.ranks or min(config.ranks) < 1 or config.max_rank < max(config.ranks):
        raise ValueError(
            f"each of ranks={config.ranks} is at least 1, and max_rank={config.max_rank} at least the largest"
        )
    checkpoint = train.resolve_start(config.checkpoint, Config.checkpoint, "python recipes/transformer.py")
    mesh = config.mesh.make_mesh()
    key = jax.random.key(config.run.seed)

    tokenizer = train.read_tokenizer(checkpoint)
    corpus = train.load_text(config.data or topics, tokenizer=tokenizer)
    old_corpus = train.load_text(config.pretraining_data, tokenizer=tokenizer)
    new = corpus.validation.ordered(config.seq_len, config.batch_size, limit=8)
    old = old_corpus.validation.ordered(config.seq_len, config.batch_size, limit=8)

    def load():
        return config.mesh.apply(zoo.load(checkpoint, mesh=mesh, dtype="float32"))

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    evaluate = train.Evaluation(loss_fn, mesh, new=new, old=old)
    base = load()
    before = evaluate(base)
    samples = train.continue_prompts(base, corpus, PROMPTS, mesh=mesh, key=key)

    rows = []
    moved = {}
    best = None
    for method, rank in find_ranks(config, mesh, base):
        name = method if rank is None else f"{method}-{rank}"
        model = adapt(config, mesh, method, rank, load())
        model, run = train_method(config, mesh, corpus, evaluate, loss_fn, model, method, name)
        if run.stopped:
            return
        merged = merge(method, model)
        rows.append(tabulate(name, method, rank, model, base, train.summary(run.directory)))
        if method in MEASURED:
            moved[name] = measure_movements(base, merged)
        if method != "full":
            adapters.save(model, run.directory / "adapter", base=config.checkpoint)
            if best is None or rows[-1]["new"] < best[0]:
                best = rows[-1]["new"], merged

    if best is not None:
        samples += train.continue_prompts(best[1], corpus, PROMPTS, mesh=mesh, key=key)
        train.export(best[1], corpus, config.run.out / "export", seq_len=config.seq_len)
    report(config, before, rows, samples, moved)


def tabulate(name, method, rank, model, base, last):
    """Return a row of the table of results."""
    return {
        "run": name,
        "method": method,
        "rank": "none" if rank is None else str(rank),
        "parameters": zoo.count(model),
        "share": f"{zoo.count(model) / zoo.count(base):.2%}",
        "new": last["new"],
        "old": last["old"],
        "bytes held": last.get("bytes_held", 0),
        "bytes at work": last.get("bytes_at_work", 0),
        "ms per step": round(last["milliseconds_per_step"]),
    }


def merge(method, model):
    return model if method == "full" else adapters.merge(model)


def measure_movements(before, after):
    """Per matrix that changed: the means over rows of |magnitude after - before| and of 1 - cosine(before, after)."""

    def get_weight(module):
        return module.dense_weight

    moved = {}
    for site, trained in zip(find_linears(before), find_linears(after), strict=True):
        get = get_weight
        for _ in site.ranges:  # layers, and experts
            get = eqx.filter_vmap(get)
        old = get(site.module)
        new = get(trained.module)
        old_norm = jnp.linalg.norm(old, axis=-1)
        new_norm = jnp.linalg.norm(new, axis=-1)
        grown = jnp.abs(new_norm - old_norm).mean(-1)
        # 1 - cosine is half the squared distance of unit vectors, which is exactly 0 if nothing moved.
        turned = jnp.square(old / old_norm[..., None] - new / new_norm[..., None]).sum(-1).mean(-1) / 2
        grown, turned = multihost_utils.process_allgather((grown, turned), tiled=True)
        for place, name in site.list_names().items():
            if turned[place] > 0:
                moved[name] = (float(grown[place]), float(turned[place]))
    return moved


def report(config, before, rows, samples, moved):
    """Write results.json and report.html, with the movements of rows as the last section."""
    changes = []
    correlations = []
    points = []
    for name, movements in moved.items():
        if len(movements) < 2:
            continue
        grown, turned = zip(*movements.values(), strict=True)
        correlations.append({"run": name, "correlation": float(np.corrcoef(grown, turned)[0, 1])})
        points.append(tools.report.Curve(name, turned, grown))
        for matrix, (magnitude, direction) in movements.items():
            changes.append({"run": name, "matrix": matrix, "magnitude": magnitude, "direction": direction})
    costs = tools.report.ScatterChart.of_rows(
        rows, "method", x="parameters", values="new", unit="bits per byte", x_label="trainable parameters"
    )
    plots = {"Trainable parameters": costs}
    tables = {}
    if points:
        movements = tools.report.ScatterChart(points, unit="change of magnitude", x_label="change of direction")
        plots["Magnitudes against directions, one point per matrix"] = movements
        tables["Correlation of magnitude and direction"] = correlations
        tables["Changes"] = changes
    if jax.process_index() == 0:
        results = {"before": before, "runs": rows, "correlations": correlations}
        (config.run.out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    tools.report_runs(
        config,
        "Adapters at equal trainable parameters",
        rows,
        description=(
            f"Bits per byte after {config.steps} steps; before: {before['new']:.3f} new, {before['old']:.3f} old"
        ),
        curves={},
        samples=samples,
        plots=plots,
        tables=tables,
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
