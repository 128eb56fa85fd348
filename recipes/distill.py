"""Distillation: a small student learns from the distributions of a teacher (knowledge distillation, GKD).

    python recipes/transformer.py                         # makes the teacher, once
    python recipes/distill.py                             # 300 steps: a student with a seventh of its parameters
    python recipes/distill.py --alpha 1                   # the same student without the teacher, to compare
    python recipes/distill.py --teacher Qwen/Qwen3-1.7B --student Qwen/Qwen3-0.6B --data chats.jsonl --seq-len 2048 \\
        --learning-rate 1e-5 --beta 0.5
    python recipes/distill.py ... --top-k 64              # the teacher reads the data once, before the first step
    python recipes/distill.py ... --on-policy 0.5         # half of the batches are samples of the student

By default the student's loss on held-out sources is 1.70 nats per byte after 300 steps, two minutes on two cores.
Without the teacher it is 1.78; the teacher's is 1.52.

The loss of a target is alpha * cross-entropy + (1 - alpha) * divergence of the student from the teacher, plus, with
--hidden, the squared error of projected hidden states. docs/distill.md explains each.
"""

from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zoo
from zoo import tools, train
from zoo.text.tasks.docstrings import read_standard_library
from zoo.text.tokenizers import have_equal_tokens
from zoo.train import objectives

START = Path("runs/transformer/export")  # where transformer.py exports its model by default
PROMPTS = ("def main(", "class Node:\n    ", "import os\n")


@dataclass(frozen=True)
class Config:
    """Load a teacher, load or make a student, train it on records, evaluate its cross-entropy, export."""

    teacher: Path = START  # Teacher: a Hugging Face directory, or a name on the hub, NAME[@REVISION].
    student: Path | None = None  # Student of the teacher's tokenizer, likewise; by default from scratch.
    keep_every: int = 0  # Make the student of every so many layers of the teacher, from the first on.
    layers: int = 2  # Blocks of a student from scratch.
    embed: int = 64  # Its width.
    heads: int = 2  # Its attention heads.
    # JSON lines, Parquet, datasets on disk or of the hub (org/name:split): files, folders, patterns, PATH=WEIGHT to
    # mix; by default the sources of Python's standard library, as text.
    data: tuple[str, ...] = ()
    records: train.RecordOptions = train.RecordOptions()
    beta: float = 0.0  # 0 for KL(teacher | student), 1 for KL(student | teacher), or between.
    temperature: float = 1.0  # Divides the logits of both, and those of samples.
    alpha: float = 0.5  # Share of the data's cross-entropy in the loss; 1 does not run the teacher.
    hidden: tuple[str, ...] = ()  # Pairs of layers whose hidden states are compared, student:teacher, from 0: 1:3.
    hidden_weight: float = 0.1  # Weight of their squared error.
    top_k: int = 0  # Store so many of the teacher's likeliest tokens of each target, and train without it.
    on_policy: float = 0.0  # Share of the batches that the student writes, from the prompts of the data.
    max_new_tokens: int = 64  # Tokens of a sample.
    seq_len: int = 128  # Tokens per row.
    batch_size: int = 16  # Rows per step, over all devices.
    steps: int = 300  # Optimizer steps.
    learning_rate: float = 3e-3  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 30  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.1  # AdamW's, of matrices and embeddings.
    eval_every: int = 100  # Steps between evaluations, each with a checkpoint.
    # Prompts to continue, before and after; the first is printed. By default, of `data` held-out ones.
    prompts: tuple[str, ...] = ()
    mesh: train.MeshOptions = train.MeshOptions()
    run: train.RunOptions = train.RunOptions(Path("runs/distill"))


def main(config: Config) -> None:
    check(config)
    directory = zoo.weights.resolve_directory(config.teacher)
    mesh = config.mesh.make_mesh()
    key, student_key, projection_key, sample_key = jax.random.split(jax.random.key(config.run.seed), 4)

    tokenizer = train.read_tokenizer(directory)
    template = config.records.read_template(directory, tokenizer) if config.data else None
    reading = {"tokenizer": tokenizer, "template": template, "seq_len": config.seq_len, "pack": not config.on_policy}
    source = config.data or read_standard_library()
    data = config.records.load(source, kinds=("text", "chat", "completion"), **reading)

    teacher = config.mesh.apply(zoo.load(directory, mesh=mesh, dtype=config.mesh.dtype))
    model, vocab = make_student(config, teacher, tokenizer, student_key, mesh)
    projections = None
    if config.hidden:
        projections = objectives.HiddenProjections(model, teacher, config.hidden, key=projection_key)
    if config.top_k:
        stored = {"batch_size": config.batch_size, "temperature": config.temperature, "vocab": vocab}
        data = train.store_top_k(teacher, data, config.top_k, mesh, dtype=config.mesh.dtype, **stored)
    batches = data.train.batches(config.batch_size, seed=config.run.seed, process=zoo.parallel.reader(mesh))
    held_out = data.validation.ordered(config.batch_size, limit=16)
    prompts = config.prompts or (train.find_prompts(data) if config.data else PROMPTS)
    trained = zoo.place((model, projections), mesh)

    peak = config.learning_rate
    warmup = min(config.warmup_steps, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(trained)), mesh.optimizer)
    terms = {"beta": config.beta, "temperature": config.temperature, "vocab": vocab}
    sampling = {"max_new_tokens": config.max_new_tokens, "temperature": config.temperature, "mesh": mesh}
    sampling["stop_tokens"] = data.stop_tokens

    def data_loss(model, batch):  # weights are 1 on what is trained on
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    def loss_fn(trained, batch, teacher, alpha):
        if teacher is None:
            return data_loss(trained[0], batch)
        student, projections = zoo.cast(trained, config.mesh.dtype)
        found = objectives.distillation_terms(student, teacher, batch, projections=projections, **terms)
        losses = alpha * -found.log_probs + (1 - alpha) * found.divergence
        losses += config.hidden_weight * found.distance
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = train.Evaluation(data_loss, mesh, unit=data.unit, validation=held_out)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, trained, opt_state):
        loss, grads = gradient(trained, *inputs)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(trained))
        trained = zoo.place(eqx.apply_updates(trained, updates), mesh)
        return trained, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config.run, config=config, frozen=teacher) as run:
        before = evaluate(model)
        goal = evaluate(teacher)["validation"]
        run.print_line(f"{zoo.count(model):,} parameters learn from {zoo.count(teacher):,} on {mesh}\n{data}")
        run.print_line(f"validation of the teacher: {goal:.3f} {data.unit}")
        online = None if config.top_k or (config.alpha == 1 and not config.hidden) else teacher
        del teacher  # unless it is needed in every step, its memory is free
        trained, opt_state = run.restore((trained, opt_state), batches)
        for batch in run.steps(batches, config.steps, tokens=config.batch_size * config.seq_len):
            alpha = config.alpha
            shown = online
            if np.random.default_rng((config.run.seed, run.step)).random() < config.on_policy:
                writer = zoo.cast(trained[0], config.mesh.dtype)
                batch = train.sample_batch(writer, batch, key=jax.random.fold_in(sample_key, run.step), **sampling)
                alpha = 0.0  # the student's own samples are not to be imitated
            if config.top_k:
                batch, top_k = train.split_top_k(batch)
                shown = zoo.place_batch(top_k, mesh)
            batch = zoo.place_batch(batch, mesh, vocab=data.vocab)
            trained, opt_state, metrics = step((batch, shown, jnp.float32(alpha)), trained, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(trained[0]))
            if run.due(config.eval_every):
                run.save((trained, opt_state), batches)

    tools.report_run(
        run,
        "Distillation",
        trained[0],
        mesh,
        data,
        config=config,
        before=before,
        headline={"validation of the teacher": f"{goal:.3f}"},
        prompts=prompts,
        key=key,
        export_seq_len=config.seq_len,
    )


def check(config: Config) -> None:
    if config.teacher == START and not START.exists():
        raise FileNotFoundError(f"{START}: no model there; `python recipes/transformer.py` makes one")
    for name in ("alpha", "beta", "on_policy"):
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: a number from 0 to 1 was expected")
    if not config.temperature > 0:
        raise ValueError(f"--temperature {config.temperature}: a number above 0 was expected")
    if config.student is not None and config.keep_every:
        raise ValueError("--student is a checkpoint and --keep-every makes one of the teacher: take one of them")
    if config.top_k and (config.beta or config.hidden or config.on_policy):
        raise ValueError("--top-k stores a teacher for the data, at --beta 0: not with --beta, --hidden, --on-policy")
    if config.on_policy and config.alpha == 1:
        raise ValueError("--on-policy samples have no data to learn from: take an --alpha below 1")
    if config.on_policy and not 0 < config.max_new_tokens < config.seq_len:
        raise ValueError(f"--max-new-tokens {config.max_new_tokens}: a row of --seq-len {config.seq_len} holds fewer")


def make_student(config: Config, teacher, tokenizer, key, mesh):
    """Return the student, and the size of the vocabulary that both models have."""
    if config.student is not None:
        directory = zoo.weights.resolve_directory(config.student)
        own = train.read_tokenizer(directory)
        if not have_equal_tokens(tokenizer, own):
            raise ValueError(f"{directory} has another tokenizer than {config.teacher}: their tokens do not compare")
        model = zoo.load(directory, mesh=mesh, dtype="float32")
        return config.mesh.apply(model), min(tokenizer.vocab, own.vocab)
    if config.keep_every:
        kept = range(0, teacher.stack.count_layers(), config.keep_every)
        model = zoo.cast(zoo.models.keep_layers(teacher, kept), "float32")
        return zoo.place(jax.tree.map(jnp.copy, model), mesh), tokenizer.vocab  # steps donate their arrays
    sizes = {"vocab": tokenizer.vocab, "embed": config.embed, "layers": config.layers, "heads": config.heads}

    def make(key):
        return config.mesh.apply(zoo.models.Transformer(**sizes, mlp=3 * config.embed, qk_norm=True, key=key))

    return zoo.init(make, key, mesh), tokenizer.vocab


if __name__ == "__main__":
    train.run_cli(main, Config)
