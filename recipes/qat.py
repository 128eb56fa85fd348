"""Quantization-aware training: weights are rounded to int4 or NVFP4 in the forward pass, and trained in float.

    python recipes/qat.py                                 # int4, int2 and NVFP4: 75 seconds on one core
    python recipes/qat.py --formats int4 --group-size 64 --out runs/qat-64
    python recipes/qat.py --resume                        # after Ctrl-C: complete runs are read back
    python recipes/qat.py --start Qwen/Qwen3-0.6B --data ~/books --seq-len 2048 --learning-rate 1e-5 --fsdp 8

A model is trained, or loaded, and trained for some steps more: in float, and once for each format, with rounded weights
of which the gradient goes straight through to the float weights (arXiv:1308.3432, arXiv:1712.05877). The table has the
loss of the rounded model before these steps, after steps in float, and after steps with rounded weights. Each format
is saved as a packed file, and the loss of that file is measured.

Rounding to int4 costs 0.028 bits per byte after steps in float, and 0.015 after steps with rounded weights; rounding to
three levels 2.02 and 0.26. These are means of three seeds: docs/qat.md.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import zoo
from zoo import adapters, tools, train
from zoo.layers.quantized.packed import AbstractPackedLinear

Format = Literal["int4", "int3", "int2", "nvfp4"]


@dataclass(frozen=True)
class Config(train.ModelConfig):  # batch_size, steps, learning_rate, ..., mesh, data, seq_len, vocab, embed, ...
    """Train or load a model, train it in float and rounded to each format, compare, save packed."""

    # Number formats of the linear layers. int3 and int2 take four bits in the file, too.
    formats: tuple[Format, ...] = ("int4", "int2", "nvfp4")
    group_size: int = 32  # Inputs that share a scale in int4, int3 and int2.
    # Model to start from: a Hugging Face directory, or a name on the hub, NAME[@REVISION]; by default one is trained.
    start: Path | None = None
    mlp_dim: int = 192
    seq_len: int = 64
    start_steps: int = 400  # Optimizer steps of the model that is trained to start from.
    start_rate: float = 6e-3  # Its peak learning rate.
    steps: int = 200
    """Optimizer steps of each run from there, in float and in each format."""
    learning_rate: float = 2e-3
    eval_every: int = 50
    mesh: train.MeshOptions = train.MeshOptions(remat="none")
    run: train.RunOptions = train.RunOptions(Path("runs/qat"))


def pack(config, name, model):
    """Quantize the linear layers except the head, which files hold packed."""
    return adapters.quantize(model, name, group_size=config.group_size)


def round_weights(config, name, model):
    """Return the model that the packed one stands for, in float32."""
    if name not in get_args(Format):
        return model
    return adapters.dequantize(pack(config, name, model))


def fit(config, mesh, corpus, evaluate, name, model, steps, peak):
    """Train the float weights of a model with weights rounded to a format in the forward pass, in a run of its own."""
    schedule = train.warmup_cosine(peak, config.warmup_steps, steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
    gradient = zoo.value_and_grad(partial(loss_fn, config.mesh.dtype), mesh, **config.mesh.accumulation)
    order = 2 * config.run.seed + (
        name == "start"
    )  # the later runs read the same batches, and other ones than the start
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=order, mesh=mesh)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        rounded = round_weights(config, name, model)  # of global arrays: a group may lie on several devices
        loss, grads = gradient(rounded, batch)
        # Straight through: the gradient at the rounded weights is taken for the gradient at the float weights.
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config, name=name, mesh=mesh, data=corpus, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, steps):
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(name, model))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)
    batches.close()
    return model, run


def main(config: Config) -> None:
    train.check_names("formats", config.formats, get_args(Format))
    if config.start_steps < 1:
        raise ValueError(f"start_steps={config.start_steps}: expected 1 or more")
    mesh = config.mesh.make_mesh()
    directory = None if config.start is None else zoo.weights.resolve_directory(config.start)
    corpus = load_text(config, directory)
    start = make_model(config, mesh, directory, corpus.vocab)
    for name in config.formats:  # sizes that do not fit a format raise now, not after an hour
        mesh.specs(eqx.filter_eval_shape(partial(pack, config, name), start))

    held_out = corpus.validation.ordered(config.seq_len, config.batch_size, limit=16)
    measure = train.Evaluation(partial(loss_fn, config.mesh.dtype), mesh, validation=held_out)
    rounders = {name: eqx.filter_jit(partial(round_weights, config, name)) for name in config.formats}

    def evaluate(name, model):
        """Return the loss of the model as it is trained: rounded, or in float and then also rounded to each format."""
        if name in rounders:
            return measure(rounders[name](model))
        rounded = {f"rounded_{name}": measure(fn(model))["validation"] for name, fn in rounders.items()}
        return {**measure(model), **rounded}

    train_run = partial(fit, config, mesh, corpus, evaluate)
    if directory is None:
        start, run = train_run("start", start, config.start_steps, config.start_rate)
        if run.stopped:
            return
    before = evaluate("start", start)
    _, control = train_run("float", copy(start, mesh), config.steps, config.learning_rate)
    if control.stopped:
        return
    after = train.summary(control.directory)
    rows = [tabulate("float", 32.0, before["validation"], after["validation"], "none", "none")]
    plots = {}
    for name in config.formats:
        model, run = train_run(name, copy(start, mesh), config.steps, config.learning_rate)
        if run.stopped:
            return
        packed = eqx.filter_jit(partial(pack, config, name))(model)
        run.export(packed, seq_len=config.seq_len, source=directory)
        read = config.mesh.apply(zoo.load(run.directory / "export", mesh=mesh, packed=True))
        losses = [lines[f"rounded_{name}"] for lines in (before, after)]
        losses += [train.summary(run.directory)["validation"], measure(read)["validation"]]
        rows.append(tabulate(name, count_bits(packed), *losses))
        plots[f"{name}: loss of the rounded model"] = draw(name, before, control, run)

    tools.report_runs(
        config,
        "Quantization-aware training",
        rows,
        description=f"Held-out text; {config.steps} steps in float, and rounded to each format, on {mesh}",
        curves={},
        plots=plots,
    )


def loss_fn(dtype, model, batch):
    return zoo.cross_entropy(zoo.cast(model, dtype), batch)


def load_text(config, directory):
    if directory is None:
        return train.load_text(config.data, vocab=config.vocab)
    return train.load_text(config.data, tokenizer=train.read_tokenizer(directory))


def make_model(config, mesh, directory, vocab):
    """Load the model to start from, or make one to be trained."""
    if directory is not None:
        return config.mesh.apply(zoo.load(directory, mesh=mesh, dtype="float32"))
    sizes = {"vocab": vocab, "embed": config.embed, "layers": config.layers, "heads": config.heads}

    def make(key):
        return config.mesh.apply(zoo.models.Transformer(**sizes, mlp=config.mlp_dim, qk_norm=True, key=key))

    return zoo.init(make, jax.random.key(config.run.seed), mesh)


def copy(model, mesh):
    return zoo.place(jax.tree.map(jnp.copy, model), mesh)  # steps donate their arrays


def count_bits(packed):
    """Return the bits per weight of the packed matrices, scales included."""
    is_packed = lambda node: isinstance(node, AbstractPackedLinear)
    layers = [node for node in jax.tree.leaves(packed, is_leaf=is_packed) if is_packed(node)]
    return zoo.inspect.measure_size(layers).bits_per_parameter


def tabulate(name, bits, before, control, trained, read):
    """Return a row of the table: losses of the rounded model in bits per byte; in the first row nothing is rounded."""
    return {
        "run": name,
        "bits per weight": bits,
        "before": before,
        "trained in float": control,
        "trained rounded": trained,
        "read from the file": read,
    }


def draw(name, before, control, run):
    """Chart the loss of the rounded model while the float model is trained, and while the rounded one is."""
    curves = []
    for label, source, metric in (
        ("trained in float", control, f"rounded_{name}"),
        ("trained rounded", run, "validation"),
    ):
        lines = [line for line in train.read_metrics(source.directory / "metrics.jsonl") if metric in line]
        losses = [before[f"rounded_{name}"], *(line[metric] for line in lines)]
        curves.append(tools.report.Curve(label, [0, *(line["step"] for line in lines)], losses))
    baselines = {"float, not rounded": train.summary(control.directory)["validation"]}
    return tools.report.LineChart(curves, "bits per byte", baselines=baselines)


if __name__ == "__main__":
    train.run_cli(main, Config)
