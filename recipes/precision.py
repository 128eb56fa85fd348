"""Compare precisions: one model in float32, bfloat16, float16, FP8, FP4, and with weights and moments of 16 bits.

    python recipes/precision.py                           # six runs in sequence: a minute on two cores
    python recipes/precision.py --methods fp8 fp8-delayed fp8-blocks nvfp4
    python recipes/precision.py --methods bfloat16 fp8 --embed 512 --layers 8 --seq-len 1024 --steps 2000 --fsdp 8
    python recipes/precision.py --resume                  # after Ctrl-C

All runs begin with the same parameters and see the same batches. The report has their curves, the rounding errors of
each layer before training (docs/precision.md), and the bytes of weights and optimizer.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax

import zoo
from zoo import precision, tools, train

import optax


class Method(NamedTuple):
    """A precision of training."""

    dtype: str  # of compute
    recipe: precision.AbstractRecipe | None = None  # of the products of linear layers
    weights: str = "float32"
    rounding: str = "nearest"  # of weights and moments that are not float32


FP8 = partial(Method, "bfloat16")
METHODS = {
    "float32": Method("float32"), "bfloat16": Method("bfloat16"), "float16": Method("float16"),
    "fp8": FP8(precision.CurrentScaling()), "fp8-delayed": FP8(precision.DelayedScaling(history=16)),
    "fp8-blocks": FP8(precision.BlockScaling()), "mxfp8": FP8(precision.MXFP8()), "nvfp4": FP8(precision.NVFP4()),
    "stochastic": Method("bfloat16", weights="bfloat16", rounding="stochastic"),
    "nearest": Method("bfloat16", weights="bfloat16"),
}  # fmt: skip


def main(
    *,
    methods: tuple[str, ...] = ("float32", "bfloat16", "float16", "fp8", "mxfp8", "stochastic"),
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 64,
    layers: int = 2,
    heads: int = 2,
    mlp_dim: int = 192,
    seq_len: int = 64,
    batch_size: int = 16,
    steps: int = 100,
    learning_rate: float = 3e-3,
    warmup_steps: int = 20,
    eval_every: int = 25,
    mesh_options: train.MeshOptions = train.MeshOptions(remat="none"),
    run_options: train.RunOptions = train.RunOptions(Path("runs/precision")),
) -> None:
    """Train in each precision, compare.

    Args:
        methods: Names of precisions.
        data: Files and directories of text; by default this Python's standard library.
        vocab: 256 for bytes; more trains a byte-pair encoding on the text.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads, embed / heads wide each.
        mlp_dim: Width of the gated MLP.
        seq_len: Tokens per sequence.
        batch_size: Sequences per step, over all devices.
        steps: Optimizer steps of each run.
        learning_rate: Peak learning rate, after linear warmup; cosine decay to a tenth.
        warmup_steps: Steps of linear warmup, at most half of all.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, mesh, warmup_steps = dict(locals()), mesh_options.make_mesh(), min(warmup_steps, steps // 2)
    train.check_names("methods", methods, METHODS)
    if mesh_options.dtype != "float32":
        raise ValueError(f"--methods names the precisions, and --dtype {mesh_options.dtype} would be ignored")
    corpus, key = train.load_text(data, vocab=vocab), jax.random.key(run_options.seed)
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))

    def make(key):
        transformer = partial(zoo.models.Transformer, vocab=corpus.vocab, embed=embed, layers=layers, qk_norm=True)
        return mesh_options.apply(transformer(heads=heads, mlp=mlp_dim, key=key))

    def lower(method, model):
        model = zoo.cast(model, method.weights)
        return model if method.recipe is None else precision.fp8(model, method.recipe)

    def make_optimizer(method):
        moment = train.BFloat16Moment() if method.rounding == "stochastic" else train.Float32Moment()
        adamw = train.adamw(schedule, b2=0.95, mask=train.decay_mask, weight_decay=0.1, first=moment, second=moment)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
        return train.dynamic_loss_scale(optimizer, initial=256.0) if method.dtype == "float16" else optimizer

    def loss_fn(dtype, model, batch, key=None):
        return zoo.cross_entropy(zoo.cast(model, dtype), batch, key=key)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state, method):
        batch, key = inputs
        gradient = zoo.value_and_grad(partial(loss_fn, method.dtype), mesh, observe=True, **mesh_options.accumulation)
        loss, grads, seen = gradient(model, batch, key=key, loss_scale=train.loss_scale(opt_state))
        updates, opt_state = make_optimizer(method).update(grads, opt_state, zoo.trainable(model))
        model = train.apply_updates(model, updates, key=key if method.rounding == "stochastic" else None)
        model, opt_state = zoo.place(model, mesh), zoo.place(opt_state, mesh.optimizer)
        if isinstance(method.recipe, precision.DelayedScaling):
            model = precision.update_amax(model, seen)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    text, drifts, rows = corpus.validation.ordered(seq_len, batch_size, limit=8), [], []
    for name in methods:
        method = METHODS[name]
        model = zoo.init(lambda key, method=method: lower(method, make(key)), key, mesh)
        opt_state = zoo.place(make_optimizer(method).init(zoo.trainable(model)), mesh.optimizer)
        evaluate = train.Evaluation(partial(loss_fn, method.dtype), mesh, validation=text)
        batches = corpus.train.batches(seq_len, batch_size, seed=run_options.seed, process=zoo.parallel.reader(mesh))
        if method.dtype != "float32":
            batch = zoo.place_batch(next(iter(text.with_process(zoo.parallel.reader(mesh)))), mesh)
            low = zoo.cast(lower(method, make(key)), method.dtype)
            errors = zoo.inspect.drift(make(key), batch, low, mesh=mesh, key=key).curves()["local_output"]
            drifts.append(tools.report.Curve(name, range(len(errors)), errors))
        with train.Run(run_options.subrun(name), config=config | {"run": name}) as run:
            run.print_line(f"{name}: {zoo.count(model):,} parameters on {mesh}; {corpus}")
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, steps, tokens=batch_size * seq_len):
                inputs = zoo.place_batch(batch, mesh, vocab=corpus.vocab), jax.random.fold_in(key, run.step)
                model, opt_state, metrics = step(inputs, model, opt_state, method)
                run.log(**metrics, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1))
                if run.every(eval_every):
                    run.log(**evaluate(model))
                if run.due(eval_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return
        last, arrays = train.summary(run.directory), jax.tree.leaves(eqx.filter((model, opt_state), eqx.is_array))
        row = {"run": name, "bits per byte": last["validation"]}
        row |= {"bytes per parameter": sum(x.nbytes for x in arrays) / zoo.count(model)}
        rows.append(row | {"tokens/s": round(last["tokens_per_second"])})
    chart = tools.report.LineChart(drifts, "units of the last place", "layers")
    tools.report_runs(
        run_options.out,
        "Precisions of training",
        rows,
        description=f"{steps} steps on {mesh}",
        plots={"Rounding errors of each layer by itself": chart},
        recipe=main,
    )


if __name__ == "__main__":
    train.run_cli(main)
