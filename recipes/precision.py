"""Compare precisions: one model in float32, bfloat16, float16, FP8, and with weights and moments of 16 bits alone.

    python recipes/precision.py                           # six runs in sequence: about a minute on two cores
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
from zoo import precision, train

import optax


class Method(NamedTuple):
    """A precision of training."""

    dtype: str
    """Compute dtype."""
    recipe: precision.AbstractRecipe | None = None
    """Products of linear layers."""
    weights: str = "float32"
    rounding: str = "nearest"
    """Rounding of weights and moments that are not float32."""


METHODS = {
    "float32": Method("float32"), "bfloat16": Method("bfloat16"), "float16": Method("float16"),
    "fp8": Method("bfloat16", precision.CurrentScaling()),
    "stochastic": Method("bfloat16", weights="bfloat16", rounding="stochastic"),
    "nearest": Method("bfloat16", weights="bfloat16"),
}  # fmt: skip


def main(
    *,
    methods: tuple[str, ...] = ("float32", "bfloat16", "float16", "fp8", "stochastic", "nearest"),
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 64,
    layers: int = 2,
    heads: int = 2,
    mlp_dim: int = 192,
    seq_len: int = 64,
    batch_size: int = 16,
    steps: int = 150,
    learning_rate: float = 3e-3,
    warmup_steps: int = 20,
    weight_decay: float = 0.1,
    eval_every: int = 50,
    mesh_options: train.MeshOptions = train.MeshOptions(remat="none"),
    run_options: train.RunOptions = train.RunOptions(Path("runs/precision")),
) -> None:
    """Train in each precision, compare.

    Args:
        methods: Names of precisions; the first is what rounding errors are drawn against.
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
        weight_decay: AdamW's, of matrices and embeddings.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, mesh, warmup_steps = dict(locals()), mesh_options.make_mesh(), min(warmup_steps, steps // 2)
    train.check_names("methods", methods, METHODS)
    if mesh_options.dtype != "float32":
        raise ValueError(f"--methods names the precisions, and --dtype {mesh_options.dtype} would be ignored")
    corpus, key = train.load_text(data, vocab=vocab), jax.random.key(run_options.seed)
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))

    def make(key):
        sizes = {"vocab": corpus.vocab, "embed": embed, "layers": layers, "heads": heads, "mlp": mlp_dim}
        return mesh_options.apply(zoo.models.Transformer(**sizes, qk_norm=True, key=key))

    def lower(method, model):
        model = zoo.cast(model, method.weights)
        return model if method.recipe is None else precision.fp8(model, method.recipe)

    def make_optimizer(method):
        moment = train.BFloat16Moment() if method.rounding == "stochastic" else train.Float32Moment()
        options = {
            "b2": 0.95,
            "weight_decay": weight_decay,
            "mask": train.decay_mask,
            "first": moment,
            "second": moment,
        }
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), train.adamw(schedule, **options))
        return train.dynamic_loss_scale(optimizer, initial=256.0) if method.dtype == "float16" else optimizer

    def loss_fn(dtype, model, batch):
        return zoo.cross_entropy(zoo.cast(model, dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state, method):
        batch, key = inputs
        gradient = zoo.value_and_grad(partial(loss_fn, method.dtype), mesh, **mesh_options.accumulation)
        loss, grads = gradient(model, batch, loss_scale=train.loss_scale(opt_state))
        updates, opt_state = make_optimizer(method).update(grads, opt_state, zoo.trainable(model))
        apply = partial(train.apply_updates, key=key) if method.rounding == "stochastic" else eqx.apply_updates
        model, opt_state = zoo.place(apply(model, updates), mesh), zoo.place(opt_state, mesh.optimizer)
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
            drift = zoo.inspect.drift(make(key), batch, zoo.cast(lower(method, make(key)), method.dtype), mesh=mesh)
            errors = drift.curves()["local_output"]
            drifts.append(train.Curve(name, range(len(errors)), errors))
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
        last, sizes = (
            train.summary(run.directory),
            [x.nbytes for x in jax.tree.leaves((model, opt_state)) if eqx.is_array(x)],
        )
        row = {"run": name, "bits per byte": last["validation"], "bytes per parameter": sum(sizes) / zoo.count(model)}
        rows.append(row | {"tokens/s": round(last["tokens_per_second"])})
    draw = partial(train.draw_line_chart, drifts, {}, unit="units of the last place", x_label="layers")
    report = {"description": f"{steps} steps on {mesh}", "plots": {"Rounding errors of each layer alone": draw}}
    train.report_runs(run_options.out, "Precisions of training", rows, **report)


if __name__ == "__main__":
    train.run_cli(main)
