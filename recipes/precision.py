"""Compare precisions: one model in float32, bfloat16, float16, FP8, FP4, and with weights and moments of 16 bits.

    python recipes/precision.py                           # six runs in sequence: a minute on two cores
    python recipes/precision.py --methods fp8 fp8-delayed fp8-blocks nvfp4
    python recipes/precision.py --methods bfloat16 fp8 --embed 512 --layers 8 --seq-len 1024 --steps 2000 --fsdp 8
    python recipes/precision.py --resume                  # after Ctrl-C

All runs begin with the same parameters and see the same batches. The report has their curves, the rounding errors of
each layer before training (docs/precision.md), and the bytes of weights and optimizer. A run in float16 has a dynamic
loss scale: to train only in float16, copy what this file does with it.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import optax

import zoo
from zoo import precision, tools, train
from zoo.ops.quantized.recipe import AbstractRecipe


class Method(NamedTuple):
    """A precision of training."""

    dtype: str  # of compute
    recipe: AbstractRecipe | None = None  # of the products of linear layers
    weights: str = "float32"
    rounding: str = "nearest"  # of weights and moments that are not float32


METHODS = {
    "float32": Method("float32"),
    "bfloat16": Method("bfloat16"),
    "float16": Method("float16"),
    "fp8": Method("bfloat16", precision.CurrentScaling()),
    "fp8-delayed": Method("bfloat16", precision.DelayedScaling(history=16)),
    "fp8-blocks": Method("bfloat16", precision.BlockScaling()),
    "mxfp8": Method("bfloat16", precision.MXFP8()),
    "nvfp4": Method("bfloat16", precision.NVFP4()),
    "stochastic": Method("bfloat16", weights="bfloat16", rounding="stochastic"),
    "nearest": Method("bfloat16", weights="bfloat16"),
}


@dataclass(frozen=True)
class Config(train.ModelConfig):  # batch_size, steps, learning_rate, ..., data, seq_len, vocab, embed, ...
    """Train in each precision, compare."""

    # Names of precisions.
    methods: tuple[str, ...] = ("float32", "bfloat16", "float16", "fp8", "mxfp8", "stochastic")
    mlp_dim: int = 192
    seq_len: int = 64
    steps: int = 100
    warmup_steps: int = 20
    eval_every: int = 25
    mesh: train.MeshOptions = train.MeshOptions(remat="none")
    run: train.RunOptions = train.RunOptions(Path("runs/precision"))


def make_model(config, vocab, method, key):
    sizes = {"vocab": vocab, "embed": config.embed, "layers": config.layers, "heads": config.heads}
    model = config.mesh.apply(zoo.models.Transformer(**sizes, mlp=config.mlp_dim, qk_norm=True, key=key))
    model = zoo.cast(model, method.weights)
    if method.recipe is None:
        return model
    return precision.fp8(model, method.recipe)


def make_optimizer(config, method, schedule):
    moment = train.BFloat16Moment() if method.rounding == "stochastic" else train.Float32Moment()
    options = {"b2": 0.95, "weight_decay": config.weight_decay, "mask": train.decay_mask}
    adamw = train.adamw(schedule, **options, first=moment, second=moment)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    if method.dtype == "float16":
        optimizer = train.dynamic_loss_scale(optimizer, initial=256.0)
    return optimizer


def train_in(name, config, mesh, corpus, held_out):
    """Train in a precision, in a run of its own; return the run, and bytes per parameter."""
    method = METHODS[name]
    key = jax.random.key(config.run.seed)
    model = zoo.init(partial(make_model, config, corpus.vocab, method), key, mesh)
    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    optimizer = make_optimizer(config, method, schedule)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)

    def loss_fn(model, batch, key=None):
        return zoo.cross_entropy(zoo.cast(model, method.dtype), batch, key=key)

    gradient = zoo.value_and_grad(loss_fn, mesh, observe=True, **config.mesh.accumulation)
    evaluate = train.Evaluation(loss_fn, mesh, validation=held_out)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        batch, key = inputs
        scale = train.loss_scale(opt_state)  # of float16; None for all others
        loss, grads, seen = gradient(model, batch, key=key, loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        rounding_key = key if method.rounding == "stochastic" else None
        model = zoo.place(train.apply_updates(model, updates, key=rounding_key), mesh)
        opt_state = zoo.place(opt_state, mesh.optimizer)
        if isinstance(method.recipe, precision.DelayedScaling):
            model = precision.update_amax(model, seen)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config, name=name, mesh=mesh, data=corpus, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps):
            step_key = jax.random.fold_in(key, run.step)
            model, opt_state, metrics = step((batch, step_key), model, opt_state)
            run.log(**metrics, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)
    arrays = jax.tree.leaves(eqx.filter((model, opt_state), eqx.is_array))
    return run, sum(x.nbytes for x in arrays) / zoo.count(model)


def measure_errors(name, config, mesh, corpus, held_out):
    """Return the rounding error of each layer by itself, on held-out text, before training."""
    key = jax.random.key(config.run.seed)
    batch = zoo.place_batch(next(iter(held_out.with_process(zoo.parallel.reader(mesh)))), mesh)
    low = zoo.cast(make_model(config, corpus.vocab, METHODS[name], key), METHODS[name].dtype)
    model = make_model(config, corpus.vocab, METHODS["float32"], key)
    return zoo.inspect.drift(model, batch, low, mesh=mesh, key=key).curves()["local_output"]


def main(config: Config) -> None:
    train.check_names("methods", config.methods, METHODS)
    if config.mesh.dtype != "float32":
        raise ValueError(f"--methods names the precisions, and --dtype {config.mesh.dtype} would be ignored")
    mesh = config.mesh.make_mesh()
    corpus = train.load_text(config.data, vocab=config.vocab)
    held_out = corpus.validation.ordered(config.seq_len, config.batch_size, limit=8)

    drifts = []
    rows = []
    for name in config.methods:
        if METHODS[name].dtype != "float32":
            errors = measure_errors(name, config, mesh, corpus, held_out)
            drifts.append(tools.report.Curve(name, range(len(errors)), errors))
        run, size = train_in(name, config, mesh, corpus, held_out)
        if run.stopped:
            return
        last = train.summary(run.directory)
        speed = round(last["tokens_per_second"])
        rows.append({"run": name, "bits per byte": last["validation"], "bytes per parameter": size, "tokens/s": speed})

    chart = tools.report.LineChart(drifts, "units of the last place", "layers")
    tools.report_runs(
        config,
        "Precisions of training",
        rows,
        description=f"{config.steps} steps on {mesh}",
        plots={"Rounding errors of each layer by itself": chart},
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
