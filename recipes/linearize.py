"""Linearize: attention layers of a trained Transformer become gated delta nets or Mamba-2, the cheapest ones first.

    python recipes/linearize.py                           # trains a small teacher, and replaces 1, 2, ... all layers
    python recipes/linearize.py --mixer mamba2 --out runs/linearize-mamba2   # the same teacher
    python recipes/linearize.py --resume                  # after Ctrl-C: complete runs are read back
    python recipes/linearize.py --teacher Qwen/Qwen3-0.6B --data ~/books --seq-len 2048 --steps 5000 --replace 14 21 \\
        --recall-share 0.1

A recurrence begins with the projections of each attention layer, and learns to return what the layer returns, on the
teacher's inputs: all layers at once (MOHAWK, arXiv:2408.10189). Each layer is then replaced alone, to rank
them. At last the first 1, 2, ... of the ranking are replaced together, and the hybrid learns the teacher's logits.

Rows are text, and associative recall (`AssociativeRecall`), which bits per byte do not show. By default a teacher
of 2.54 bits per byte that recalls everything loses 0.01 without any attention, and recalls 0.998: docs/linearize.md.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zoo
from zoo import tools, train
from zoo.layers import Attention, GatedConvolution, GatedMLP, RMSNorm
from zoo.layers.recurrent.from_attention import copy_to_gated_delta_net, copy_to_mamba2
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim
from zoo.text.batches import OrderedBatches
from zoo.text.tasks.synthetic import AssociativeRecall
from zoo.train import objectives
from zoo.train.objectives.distillation import top_k_log_probs

COPIES = {"gated-delta-net": copy_to_gated_delta_net, "mamba2": copy_to_mamba2}
STATE_LENGTH = 8192  # tokens after which bytes of decoding state are counted
PROMPTS = ("def main(", "class Node:\n    ", "import os\n")


@dataclass(frozen=True)
class Config(train.TextConfig):  # batch_size, steps, learning_rate, ..., data, seq_len
    """Train or load a teacher, match a recurrence to each attention layer, rank the layers, distill hybrids."""

    mixer: Literal["gated-delta-net", "mamba2"] = "gated-delta-net"  # What takes the place of attention.
    # Teacher: a Hugging Face directory, or a name on the hub, NAME[@REVISION]; by default one is trained.
    teacher: Path | None = None
    replace: tuple[int, ...] = ()  # Numbers of layers to replace, a hybrid for each; by default 1, 2, ... all.
    order: tuple[int, ...] = ()  # Layers in the order to replace them, from 0; by default by rank.
    embed: int = 64  # Width of the trained teacher.
    layers: int = 3  # Its blocks: a gated short convolution, attention, an MLP.
    heads: int = 2  # Its attention heads.
    recall_share: float = 0.7  # Share of the rows that are recall; the others are text.
    recall_vocab: int = 32  # Tokens of recall, half of them keys, half values.
    num_pairs: int = 8  # Key-value pairs per row of recall, and queries.
    seq_len: int = 32
    batch_size: int = 32
    teacher_steps: int = 500  # Optimizer steps of the teacher.
    match_steps: int = 200  # Optimizer steps in which mixers learn the outputs of attention; 0 for copies only.
    steps: int = 200
    """Optimizer steps in which each hybrid learns the teacher's logits."""
    teacher_rate: float = 1e-2  # Peak learning rate of the teacher.
    match_rate: float = 3e-3  # Peak learning rate of the mixers.
    learning_rate: float = 1e-3
    eval_batches: int = 16  # Held-out batches of text, and of recall.
    mesh: train.MeshOptions = train.MeshOptions(remat="none")
    run: train.RunOptions = train.RunOptions(Path("runs/linearize"))


def load_rows(config, corpus, mesh):
    """Return the rows of training, text mixed with recall, and held-out batches of both."""
    if config.recall_vocab > corpus.vocab:
        raise ValueError(f"recall_vocab={config.recall_vocab} is more than the {corpus.vocab} tokens of the text")
    recall = partial(AssociativeRecall, config.recall_vocab, config.seq_len, config.num_pairs)
    text = train.TokenWindows(corpus.train.tokens, config.seq_len, separator=corpus.train.separator)
    shares = {"text": 1 - config.recall_share, "recall": config.recall_share}
    rows = train.Mixture({"text": text, "recall": recall(seed=2 * config.run.seed)}, shares)
    unseen = recall(seed=2 * config.run.seed + 1, rows=config.eval_batches * config.batch_size)
    reader = zoo.parallel.reader(mesh)
    held_out = corpus.validation.ordered(config.seq_len, config.batch_size, limit=config.eval_batches, process=reader)
    return rows, {"text": held_out, "recall": OrderedBatches(unseen, config.batch_size, process=reader)}


def data_loss(dtype, model, batch, teacher):
    return zoo.cross_entropy(zoo.cast(model, dtype), batch)


def compare_mixers(dtype, mixers, batch, teacher):
    """Return the squared error of each mixer on the teacher's inputs, and the power of the attention's output."""
    mixers, teacher = zoo.cast((mixers, teacher), dtype)
    found = objectives.mixer_matching(mixers, teacher, batch)
    sums = {"error": found.errors.sum((1, 2)), "power": found.powers.sum((1, 2))}
    return (found.errors.sum(), batch["tokens"].size), sums


def match_loss(dtype, mixers, batch, teacher):
    loss, _ = compare_mixers(dtype, mixers, batch, teacher)
    return loss


def distill_loss(dtype, model, batch, teacher):
    model, teacher = zoo.cast((model, teacher), dtype)
    losses = objectives.distillation(model, teacher, batch)
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


def compare_models(dtype, model, batch, teacher):
    """Return the divergence of a model from the teacher, and sums of its loss and of its right guesses."""
    model, teacher = zoo.cast((model, teacher), dtype)
    terms = objectives.distillation_terms(model, teacher, batch)
    correct = top_k_log_probs(model, batch, 1).ids[..., 0] == batch["targets"]
    found = {"nats": -terms.log_probs, "divergence": terms.divergence, "correct": correct}
    sums = {name: (x * batch["weights"]).sum() for name, x in found.items()}
    count = batch["weights"].sum()
    return (sums["divergence"], count), {**sums, "count": count}


def make_evaluations(config, mesh, held_out):
    """Return the evaluation of mixers, and the evaluation of models."""
    measure_mixers = zoo.value(partial(compare_mixers, config.mesh.dtype), mesh, has_aux=True)
    measure_model = zoo.value(partial(compare_models, config.mesh.dtype), mesh, has_aux=True)
    placed = {name: [zoo.place_batch(batch, mesh) for batch in batches] for name, batches in held_out.items()}

    def explain(mixers, teacher):
        """Return the fraction of each layer's output that its mixer does not explain."""
        sums = sum_over(measure_mixers, placed["text"] + placed["recall"], mixers, teacher)
        return {"unexplained": sums["error"] / sums["power"]}

    def evaluate(model, teacher):
        """Return bits per byte of text, accuracy of recall, and the mean divergence from the teacher on both."""
        text, recall = (sum_over(measure_model, placed[name], model, teacher) for name in ("text", "recall"))
        divergences = [float(sums["divergence"] / sums["count"]) for sums in (text, recall)]
        return {
            "validation": float(train.bits_per_byte(text["nats"] / text["count"], held_out["text"])),
            "recall": float(recall["correct"] / recall["count"]),
            "divergence": sum(divergences) / 2,
        }

    return explain, evaluate


def sum_over(measure, batches, tree, teacher):
    """Sum what `measure` returns besides a loss over batches."""
    sums = jax.device_get([measure(tree, batch, teacher)[1] for batch in batches])
    return jax.tree.map(lambda *parts: np.sum(parts, axis=0), *sums)


def replace_layers(teacher, mixers, layers, mesh):
    """Return the teacher with these layers replaced."""
    hybrid = zoo.models.replace_mixers(teacher, {layer: mixers[layer] for layer in layers})
    return zoo.place(jax.tree.map(jnp.copy, hybrid), mesh)  # steps donate their arrays


def fit(config, mesh, corpus, rows, name, tree, loss_fn, evaluate, steps, peak, frozen=None):
    """Train a tree in a run of its own; return it and the run."""
    schedule = train.warmup_cosine(peak, config.warmup_steps, steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(tree)), mesh.optimizer)
    gradient = zoo.value_and_grad(partial(loss_fn, config.mesh.dtype), mesh, **config.mesh.accumulation)
    batches = train.ShuffledBatches(rows, config.batch_size, seed=config.run.seed, mesh=mesh, digest=corpus.digest)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, tree, opt_state):
        loss, grads = gradient(tree, *inputs)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(tree))
        tree = zoo.place(eqx.apply_updates(tree, updates), mesh)
        return tree, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config, name=name, mesh=mesh, data=corpus, model=tree, frozen=frozen) as run:
        tree, opt_state = run.restore((tree, opt_state), batches)
        for batch in run.steps(batches, steps):
            tree, opt_state, metrics = step((batch, frozen), tree, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(tree, tree if frozen is None else frozen))
            if run.due(config.eval_every):
                run.save((tree, opt_state), batches)
    batches.close()
    return tree, run


def main(config: Config) -> None:
    check(config)
    mesh = config.mesh.make_mesh()
    teacher_key, mixer_key, sample_key = jax.random.split(jax.random.key(config.run.seed), 3)

    directory = None if config.teacher is None else zoo.weights.resolve_directory(config.teacher)
    tokenizer = None if directory is None else train.read_tokenizer(directory)
    corpus = train.load_text(config.data, tokenizer=tokenizer)
    rows, held_out = load_rows(config, corpus, mesh)
    teacher = make_teacher(config, directory, corpus.vocab, teacher_key, mesh)
    attention = teacher.stack.find_layers("attention")
    check_layers(config, attention)
    explain, evaluate = make_evaluations(config, mesh, held_out)
    train_run = partial(fit, config, mesh, corpus, rows)

    if directory is None:
        teacher, run = train_run("teacher", teacher, data_loss, evaluate, config.teacher_steps, config.teacher_rate)
        if run.stopped:
            return
    goal = evaluate(teacher, teacher)

    mixers = zoo.place(make_mixers(config, teacher, attention, mixer_key), mesh)
    copied = explain(mixers, teacher)["unexplained"]
    if config.match_steps:
        mixers, run = train_run("match", mixers, match_loss, explain, config.match_steps, config.match_rate, teacher)
        if run.stopped:
            return
    matched = explain(mixers, teacher)["unexplained"]

    ranks = []
    for layer, before, after in zip(attention, copied, matched, strict=True):
        unexplained = {"unexplained, copied": float(before), "matched": float(after)}
        ranks.append(
            {"layer": layer, **unexplained, **evaluate(replace_layers(teacher, mixers, [layer], mesh), teacher)}
        )
    ranks.sort(key=lambda row: row["divergence"])
    order = config.order or [row["layer"] for row in ranks]

    results = [tabulate(config, "teacher", (), teacher, goal, goal)]
    for count in config.replace or range(1, len(order) + 1):
        model = replace_layers(teacher, mixers, order[:count], mesh)
        before = evaluate(model, teacher)
        name = f"replaced-{count}"
        model, run = train_run(name, model, distill_loss, evaluate, config.steps, config.learning_rate, teacher)
        if run.stopped:
            return
        run.export(model, seq_len=config.seq_len)  # or says where its weights are
        results.append(tabulate(config, name, order[:count], model, before, train.summary(run.directory)))

    samples = []
    for shown in (teacher, model):
        samples += train.continue_prompts(shown, corpus, PROMPTS, mesh=mesh, key=sample_key)
    tools.report_runs(
        config,
        "A Transformer, linearized",
        results,
        description=f"{config.mixer} in place of attention; {config.steps} steps of distillation, on {mesh}",
        curves={"validation": "validation"},
        plots=draw(results),
        tables={"Each layer replaced alone, after matching": ranks},
        samples=samples,
    )


def check(config: Config) -> None:
    """Refuse values that cannot be trained, before anything is loaded."""
    if min(config.teacher_steps, config.eval_batches) < 1 or config.match_steps < 0:
        raise ValueError("teacher_steps and eval_batches are 1 or more, match_steps 0 or more")
    if not 0 < config.recall_share < 1:
        raise ValueError(f"recall_share={config.recall_share}: expected a share of the rows between 0 and 1")


def check_layers(config, attention):
    """Refuse layers that the teacher does not have, before anything is trained."""
    if not attention:
        raise ValueError("the teacher has no layers of zoo.layers.Attention that could be replaced")
    if len(set(config.order)) < len(config.order) or not set(config.order) <= set(attention):
        raise ValueError(f"order={config.order}: expected some of the layers {attention}, each once")
    most = len(config.order or attention)
    if not all(0 < count <= most for count in config.replace):
        raise ValueError(f"replace={config.replace}: expected numbers of layers from 1 to {most}")


def make_teacher(config, directory, vocab, key, mesh):
    """Load the teacher, or make one to be trained."""
    options = replace(config.mesh, recurrence="auto")  # it has no recurrences
    if directory is not None:
        return options.apply(zoo.load(directory, mesh=mesh, dtype="float32"))
    head_dim = config.embed // config.heads
    norm = partial(RMSNorm, head_dim, features=Dim("head_dim"))
    attention = partial(Attention, heads=config.heads, rotary=Rotary(head_dim), qk_norm=norm)
    # With a convolution before it, a layer of attention recalls after a few hundred steps: docs/recall.md.
    parts = {"pattern": (GatedConvolution, attention), "ffns": (None, partial(GatedMLP, mlp=3 * config.embed))}

    def make(key):
        sizes = {"vocab": vocab, "embed": config.embed, "layers": 2 * config.layers}
        return options.apply(zoo.models.Hybrid(**sizes, **parts, tied=False, key=key))

    return zoo.init(make, key, mesh)


def make_mixers(config, teacher, attention, key):
    """Copy these attention layers of the teacher to recurrences."""
    blocks = list(teacher.stack.iter_blocks())
    copy = COPIES[config.mixer]
    mixers = {layer: copy(blocks[layer].mixer, key=jax.random.fold_in(key, layer)) for layer in attention}
    if config.mesh.recurrence == "auto":
        return mixers
    return zoo.set_implementations(mixers, recurrence=config.mesh.recurrence)


def tabulate(config, run, replaced, model, before, after):
    """Return a row of the table of results."""
    return {
        "run": run,
        "layers": ", ".join(map(str, sorted(replaced))) or "none",
        "bits per byte, matched": before["validation"],
        "distilled": after["validation"],
        "recall, matched": before["recall"],
        "recall, distilled": after["recall"],
        f"bytes of state after {STATE_LENGTH:,} tokens": zoo.inspect.state_bytes(model, STATE_LENGTH),
    }


def draw(results):
    """Chart quality against the number of layers replaced."""
    counts = [0 if row["layers"] == "none" else row["layers"].count(",") + 1 for row in results]
    plots = {}
    for title, names in {
        "Bits per byte": ("bits per byte, matched", "distilled"),
        "Recall": ("recall, matched", "recall, distilled"),
    }.items():
        curves = [
            tools.report.Curve(label, counts, [row[name] for row in results])
            for label, name in zip(("matched", "distilled"), names, strict=True)
        ]
        unit = "bits per byte" if title != "Recall" else "accuracy"
        plots[f"{title} against layers replaced"] = tools.report.LineChart(curves, unit, "layers replaced")
    return plots


if __name__ == "__main__":
    train.run_cli(main, Config)
