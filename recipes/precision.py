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


FP8 = partial(Method, "bfloat16")
METHODS = {
    "float32": Method("float32"),
    "bfloat16": Method("bfloat16"),
    "float16": Method("float16"),
    "fp8": FP8(precision.CurrentScaling()),
    "fp8-delayed": FP8(precision.DelayedScaling(history=16)),
    "fp8-blocks": FP8(precision.BlockScaling()),
    "mxfp8": FP8(precision.MXFP8()),
    "nvfp4": FP8(precision.NVFP4()),
    "stochastic": Method("bfloat16", weights="bfloat16", rounding="stochastic"),
    "nearest": Method("bfloat16", weights="bfloat16"),
}


@dataclass(frozen=True)
class Config:
    """Train in each precision, compare."""

    # Names of precisions.
    methods: tuple[str, ...] = ("float32", "bfloat16", "float16", "fp8", "mxfp8", "stochastic")
    data: tuple[Path, ...] = ()  # Files and directories of text; by default this Python's standard library.
    vocab: int = 256  # 256 for bytes; more trains a byte-pair encoding on the text.
    embed: int = 64  # Width of the residual stream.
    layers: int = 2  # Number of blocks.
    heads: int = 2  # Attention heads, embed / heads wide each.
    mlp_dim: int = 192  # Width of the gated MLP.
    seq_len: int = 64  # Tokens per sequence.
    batch_size: int = 16  # Sequences per step, over all devices.
    steps: int = 100  # Optimizer steps of each run.
    learning_rate: float = 3e-3  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 20  # Steps of linear warmup, at most half of all.
    eval_every: int = 25  # Steps between evaluations, each with a checkpoint.
    mesh: train.MeshOptions = train.MeshOptions(remat="none")
    run: train.RunOptions = train.RunOptions(Path("runs/precision"))


def main(config: Config) -> None:
    train.check_names("methods", config.methods, METHODS)
    if config.mesh.dtype != "float32":
        raise ValueError(f"--methods names the precisions, and --dtype {config.mesh.dtype} would be ignored")
    mesh = config.mesh.make_mesh()
    key = jax.random.key(config.run.seed)

    corpus = train.load_text(config.data, vocab=config.vocab)
    reader = zoo.parallel.reader(mesh)
    validation = corpus.validation.ordered(config.seq_len, config.batch_size, limit=8)

    def make_model(key):
        model = zoo.models.Transformer(
            vocab=corpus.vocab,
            embed=config.embed,
            layers=config.layers,
            heads=config.heads,
            mlp=config.mlp_dim,
            qk_norm=True,
            key=key,
        )
        return config.mesh.apply(model)

    def lower(method, model):
        model = zoo.cast(model, method.weights)
        if method.recipe is None:
            return model
        return precision.fp8(model, method.recipe)

    peak = config.learning_rate
    warmup = min(config.warmup_steps, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten

    def make_optimizer(method):
        if method.rounding == "stochastic":
            moment = train.BFloat16Moment()
        else:
            moment = train.Float32Moment()
        adamw = train.adamw(schedule, b2=0.95, mask=train.decay_mask, weight_decay=0.1, first=moment, second=moment)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
        if method.dtype == "float16":
            optimizer = train.dynamic_loss_scale(optimizer, initial=256.0)
        return optimizer

    def loss_fn(dtype, model, batch, key=None):
        return zoo.cross_entropy(zoo.cast(model, dtype), batch, key=key)

    def make_step(method):
        loss_of_method = partial(loss_fn, method.dtype)
        gradient = zoo.value_and_grad(loss_of_method, mesh, observe=True, **config.mesh.accumulation)
        optimizer = make_optimizer(method)

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

        return step

    def measure_errors(method):
        """Return the rounding error of each layer by itself, on held-out text."""
        batch = zoo.place_batch(next(iter(validation.with_process(reader))), mesh)
        low = zoo.cast(lower(method, make_model(key)), method.dtype)
        return zoo.inspect.drift(make_model(key), batch, low, mesh=mesh, key=key).curves()["local_output"]

    drifts = []
    rows = []
    for name in config.methods:
        method = METHODS[name]
        model = zoo.init(lambda key, method=method: lower(method, make_model(key)), key, mesh)
        opt_state = zoo.place(make_optimizer(method).init(zoo.trainable(model)), mesh.optimizer)
        step = make_step(method)
        evaluate = train.Evaluation(partial(loss_fn, method.dtype), mesh, validation=validation)
        batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, process=reader)
        if method.dtype != "float32":
            errors = measure_errors(method)
            drifts.append(tools.report.Curve(name, range(len(errors)), errors))

        with train.Run(config.run, config=config, name=name) as run:
            run.print_line(f"{name}: {zoo.count(model):,} parameters on {mesh}; {corpus}")
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, config.steps, tokens=config.batch_size * config.seq_len):
                batch = zoo.place_batch(batch, mesh, vocab=corpus.vocab)
                step_key = jax.random.fold_in(key, run.step)
                model, opt_state, metrics = step((batch, step_key), model, opt_state)
                run.log(**metrics, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1))
                if run.every(config.eval_every):
                    run.log(**evaluate(model))
                if run.due(config.eval_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return

        last = train.summary(run.directory)
        arrays = jax.tree.leaves(eqx.filter((model, opt_state), eqx.is_array))
        row = {
            "run": name,
            "bits per byte": last["validation"],
            "bytes per parameter": sum(x.nbytes for x in arrays) / zoo.count(model),
            "tokens/s": round(last["tokens_per_second"]),
        }
        rows.append(row)

    chart = tools.report.LineChart(drifts, "units of the last place", "layers")
    tools.report_runs(
        config.run.out,
        "Precisions of training",
        rows,
        config=config,
        description=f"{config.steps} steps on {mesh}",
        plots={"Rounding errors of each layer by itself": chart},
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
