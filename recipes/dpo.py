"""Preference optimization (DPO and its kin): a checkpoint learns from pairs of answers, of which one is preferred.

    python recipes/transformer.py && python recipes/sft.py  # make the checkpoint to start from, once
    python recipes/dpo.py                                   # 120 steps on docstrings of Python's standard library
    python recipes/dpo.py --checkpoint Qwen/Qwen3-0.6B --data pairs.jsonl --seq-len 2048 --learning-rate 1e-6
    python recipes/dpo.py --checkpoint Qwen/Qwen3-0.6B --data pairs.jsonl --seq-len 2048 --learning-rate 1e-5 --lora 16
    python recipes/dpo.py --loss simpo                      # one of eight losses, without a reference

By default a docstring is preferred to itself with two words exchanged. On held-out pairs the accuracy rises from 50% to
80% and the margin from 0 to 1.07 in a minute or two on two cores. The chosen answers become less likely, too, by 17
nats: docs/preferences.md says what that means, and which loss when.

Both answers of a pair are segments of one row, with the prompt in each. `zoo.log_probs` gives log p of every target,
and the loss is a function of its sums over both answers, relative to a reference: the frozen model that training starts
from. With `--lora` it is the model without its adapters; else it is computed once for all rows and kept on the disk. A
reward is beta times the log-ratio of an answer to the reference, and an accuracy the share of pairs whose chosen answer
has the larger one.
"""

import inspect
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import zoo
from zoo import tools, train
from zoo.text.tasks.docstrings import read_docstrings
from zoo.train import objectives

START = Path("runs/sft/export")  # where sft.py exports its model by default
PROMPTS = ("What does `json.dumps` do?", "What does `pathlib.Path.exists` do?", "What does `random.shuffle` do?")
LOSSES = {  # name, function of both answers of a pair, their log-ratios summed or averaged over tokens
    "dpo": (objectives.dpo, train.sum_pairs),
    "robust": (objectives.robust_dpo, train.sum_pairs),
    "ipo": (objectives.ipo, train.average_pairs),
    "hinge": (objectives.hinge, train.sum_pairs),
    "apo_zero": (objectives.apo_zero, train.sum_pairs),
    "apo_down": (objectives.apo_down, train.sum_pairs),
    "simpo": (objectives.simpo, train.average_pairs),  # of log p, without a reference, as orpo
    "orpo": (objectives.orpo, train.average_pairs),
}


@dataclass(frozen=True)
class Config:
    """Load a model and preference pairs, train, measure accuracy and margin on held-out pairs, export."""

    checkpoint: Path = START  # Model to start from: a Hugging Face directory, or a name on the hub, NAME[@REVISION].
    # Records with chosen, rejected and a prompt: JSON lines, Parquet, datasets on disk or of the hub (org/name:split),
    # folders, patterns, PATH=WEIGHT to mix; by default docstrings of Python's standard library, as they are and with
    # two words exchanged.
    data: tuple[str, ...] = ()
    records: train.RecordOptions = train.RecordOptions(kind="preference")
    loss: Literal["dpo", "robust", "ipo", "hinge", "apo_zero", "apo_down", "simpo", "orpo"] = "dpo"  # Objective.
    # Scale of rewards: a larger one keeps the model nearer to the reference. By default 0.1, simpo's 2.
    beta: float | None = None
    # With dpo (then it is cDPO) and robust, share of pairs with flipped labels, below 0.5. By default 0, robust's 0.1.
    label_smoothing: float | None = None
    gamma: float | None = None  # With simpo, margin by which the chosen reward is to be larger. By default 1.
    sft_weight: float = 0.0  # Adds this times -log p per token of the chosen answer (RPO). 0 stands for 1 with orpo.
    # Model without adapters, log p computed before the first step, or a copy of the model; auto is adapters with lora,
    # else precomputed.
    reference: Literal["auto", "adapters", "precomputed", "copy"] = "auto"
    lora: int = 0  # Rank of LoRA adapters; 0 trains all parameters.
    # Linear layers to adapt: ends of names, patterns, or all-linear for all but the head.
    targets: tuple[str, ...] = ("all-linear",)
    seq_len: int = 256  # Tokens per row, of one or several pairs; both answers and twice the prompt are in one row.
    batch_size: int = 16  # Rows per step, over all devices.
    steps: int = 120  # Optimizer steps.
    epochs: float | None = None  # Passes over the training rows, instead of steps.
    learning_rate: float = 1e-4  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 20  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.0  # AdamW's, of matrices and embeddings.
    eval_every: int = 40  # Steps between evaluations, each with a checkpoint.
    # Questions to answer, before and after; the first is printed. By default, of `data` held-out ones.
    prompts: tuple[str, ...] = ()
    mesh: train.MeshOptions = train.MeshOptions(remat="full")
    run: train.RunOptions = train.RunOptions(Path("runs/dpo"))


def main(config: Config) -> None:
    if config.checkpoint == START and not START.exists():
        raise FileNotFoundError(f"{START}: no model there; `python recipes/sft.py` makes one, from transformer.py's")
    objective, combine = LOSSES[config.loss]
    options = find_options(config)
    beta = options["beta"]
    sft_weight = config.sft_weight or float(config.loss == "orpo")
    reference = find_reference(config)
    checkpoint = zoo.weights.resolve_directory(config.checkpoint)
    mesh = config.mesh.make_mesh()
    key = jax.random.key(config.run.seed)

    tokenizer = train.read_tokenizer(checkpoint)
    template = config.records.read_template(checkpoint, tokenizer)
    source = config.data or make_pairs(read_docstrings())
    reading = {"tokenizer": tokenizer, "template": template, "seq_len": config.seq_len}
    data = config.records.load(source, kinds=("preference",), **reading)
    steps = config.steps
    if config.epochs is not None:  # before log p of the reference is computed
        steps = data.train.batches(config.batch_size, process=(0, 1)).count_steps(config.epochs)
    dtype = config.mesh.dtype if config.lora else "float32"  # of a frozen base the compute dtype
    base = config.mesh.apply(zoo.load(checkpoint, mesh=mesh, dtype=dtype))
    if reference == "precomputed":
        size = {"batch_size": config.batch_size, "dtype": config.mesh.dtype}
        data = train.precompute_reference(base, data, mesh, **size)
    batches = data.train.batches(config.batch_size, seed=config.run.seed, process=zoo.parallel.reader(mesh))
    held_out = data.validation.ordered(config.batch_size, limit=16)
    prompts = config.prompts or (train.find_prompts(data) if config.data else PROMPTS)

    frozen = None
    if reference == "copy":
        arrays, static = eqx.partition(base, eqx.is_array)
        frozen = eqx.combine(jax.tree.map(jnp.copy, arrays), static)
    model = base
    if config.lora:
        model = zoo.adapters.lora(base, targets=config.targets, rank=config.lora, alpha=2 * config.lora, key=key)
        model = zoo.place(model, mesh)

    peak = config.learning_rate
    warmup = min(config.warmup_steps, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def compute_reference(model, batch, frozen):
        if reference == "none":
            return 0.0
        if reference == "precomputed":
            return batch["reference"]
        if reference == "adapters":
            frozen = zoo.adapters.remove(model)
        return jax.lax.stop_gradient(zoo.log_probs(zoo.cast(frozen, config.mesh.dtype), batch))

    def loss_fn(model, batch, frozen):  # weights are 1 on the tokens of answers
        model = zoo.cast(model, config.mesh.dtype)
        log_probs = zoo.log_probs(model, batch)
        chosen, rejected, mask = combine(log_probs - compute_reference(model, batch, frozen), batch)
        losses = objective(chosen, rejected, **options)
        if sft_weight:
            losses -= sft_weight * train.average_pairs(log_probs, batch).chosen
        rewards = {"chosen_reward": beta * chosen, "rejected_reward": beta * rejected}
        right = (1 + jnp.sign(chosen - rejected)) / 2  # a tie is half right
        values = {"pairs": mask, "accuracy": right, "margin": beta * (chosen - rejected), **rewards}
        return ((losses * mask).sum(), mask.sum()), {name: (x * mask).sum() for name, x in values.items()}

    gradient = zoo.value_and_grad(loss_fn, mesh, has_aux=True, **config.mesh.accumulation)
    evaluation = train.Evaluation(loss_fn, mesh, has_aux=True, unit=data.unit, validation=held_out)

    def evaluate(model, frozen):
        losses, sums = evaluation(model, frozen)
        return losses | {f"validation_{name}": x for name, x in average(sums).items()}

    @eqx.filter_jit(donate="all-except-first")
    def step(batch_and_frozen, model, opt_state):
        (loss, sums), grads = gradient(model, *batch_and_frozen)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, **average(sums), "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config.run, config=config, frozen=model if config.lora or reference != "none" else None) as run:
        run.print_line(f"{zoo.count(model):,} trained parameters of {config.checkpoint} on {mesh}\n{data}\n{batches}")
        before = evaluate(model, frozen)
        samples = train.continue_prompts(model, data, prompts, mesh=mesh, key=key)
        trainable, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
        model = eqx.combine(trainable, model)
        for batch in run.steps(batches, steps, tokens=config.batch_size * config.seq_len):
            batch = zoo.place_batch(batch, mesh, vocab=data.vocab)
            model, opt_state, metrics = step((batch, frozen), model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model, frozen))
            if run.due(config.eval_every):
                run.save((zoo.trainable(model), opt_state), batches)

    parameters = zoo.trainable(model)
    if config.lora:
        zoo.adapters.save(model, run.directory / "adapter", base=config.checkpoint)
        data.save(run.directory / "adapter")
        model = zoo.adapters.merge(model)
    tools.report_run(
        run,
        "Preference optimization",
        model,
        mesh,
        data,
        config=config,
        before={name: x for name, x in before.items() if not name.endswith("reward")},
        unit="per pair",
        curves={"loss": "training", "validation": "validation"},
        plots=draw_curves(run.directory),
        samples=samples,
        prompts=prompts,
        key=key,
        export_seq_len=config.seq_len,
        parameters=parameters,
    )


def find_options(config):
    """Return the options of the loss, beta always. **Raises** `ValueError` for options that it does not have."""
    defaults = inspect.signature(LOSSES[config.loss][0]).parameters
    given = {"beta": config.beta, "label_smoothing": config.label_smoothing, "gamma": config.gamma}
    options = {name: value for name, value in given.items() if value is not None}
    for name in options:
        if name not in defaults:
            raise ValueError(f"--{name.replace('_', '-')}: --loss {config.loss} has no such option")
    if options.setdefault("beta", defaults["beta"].default) <= 0:
        raise ValueError(f"--beta {config.beta}: a number above 0 was expected")
    if not 0 <= options.get("label_smoothing", 0) < 0.5:
        raise ValueError(f"--label-smoothing {config.label_smoothing}: a share of pairs below 0.5 was expected")
    return options


def find_reference(config):
    """Return "adapters", "precomputed", "copy", or "none" for a loss of log p. **Raises** `ValueError` for another."""
    if config.loss in ("simpo", "orpo"):
        if config.reference != "auto":
            raise ValueError(f"--reference {config.reference}: --loss {config.loss} has no reference")
        return "none"
    if config.reference == "adapters" and not config.lora:
        raise ValueError("--reference adapters is the model without adapters: add --lora 16, or take precomputed")
    if config.reference == "auto":
        return "adapters" if config.lora else "precomputed"
    return config.reference


def draw_curves(directory):
    """Chart the accuracy and the rewards of the pairs trained on, and of the held-out ones."""
    lines = train.read_metrics(directory / "metrics.jsonl")
    charts = {}
    for title, names in {"Accuracy": ["accuracy"], "Rewards": ["chosen_reward", "rejected_reward"]}.items():
        curves = []
        for name in names + [f"validation_{name}" for name in names]:
            steps = [line["step"] for line in lines if name in line]
            values = [line[name] for line in lines if name in line]
            curves.append(tools.report.Curve(name.replace("_", " "), steps, values, smooth=name in names))
        charts[title] = tools.report.LineChart(curves, title.lower())
    return charts


def average(sums):
    """Divide sums over pairs by the number of pairs."""
    return {name: total / sums["pairs"] for name, total in sums.items() if name != "pairs"}


def make_pairs(chats):
    """Prefer each docstring to itself with two neighboring words exchanged."""
    pick = random.Random(0)
    pairs = []
    for chat in chats:
        question, answer = chat["messages"]
        words = answer["content"].split()
        place = pick.randrange(len(words))
        words[place : place + 2] = reversed(words[place : place + 2])
        rejected = {**answer, "content": " ".join(words)}
        if rejected != answer:
            pairs.append({"prompt": [question], "chosen": [answer], "rejected": [rejected]})
    return pairs


if __name__ == "__main__":
    train.run_cli(main, Config)
