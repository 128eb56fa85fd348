"""Distillation: a small student learns from the distributions of a teacher (knowledge distillation, GKD).

    python recipes/transformer.py                         # makes the teacher, once
    python recipes/distill.py                             # 300 steps: a student with a seventh of its parameters
    python recipes/distill.py --alpha 1                   # the same student without the teacher, to compare
    python recipes/distill.py --teacher Qwen/Qwen3-1.7B --student Qwen/Qwen3-0.6B --data chats.jsonl --seq-len 2048 \\
        --learning-rate 1e-5 --beta 0.5

By default the student's loss on held-out sources is 1.70 nats per byte after 300 steps, two minutes on two cores.
Without the teacher it is 1.78; the teacher's is 1.52.

The loss of a target is alpha * cross-entropy + (1 - alpha) * divergence of the student from the teacher. Teachers that
are stored, hidden states, samples of the student, and students of the teacher's layers: docs/distill.md has the lines.
"""

from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import optax

import zoo
from zoo import tools, train
from zoo.text.tasks.docstrings import read_standard_library
from zoo.text.tokenizers import have_equal_tokens
from zoo.train import objectives

PROMPTS = ("def main(", "class Node:\n    ", "import os\n")


@dataclass(frozen=True)
class Config(train.RecordConfig):  # batch_size, steps, learning_rate, ..., mesh, data, seq_len, epochs, prompts
    """Load a teacher, load or make a student, train it on records, evaluate its cross-entropy, export."""

    # Teacher: a Hugging Face directory, or a name on the hub, NAME[@REVISION].
    teacher: Path = Path("runs/transformer/export")
    student: Path | None = None  # Student of the teacher's tokenizer, likewise; by default from scratch.
    layers: int = 2  # Blocks of a student from scratch.
    embed: int = 64  # Its width.
    heads: int = 2  # Its attention heads.
    alpha: float = 0.5  # Share of the data's cross-entropy in the loss; 1 does not run the teacher.
    beta: float = 0.0  # 0 for KL(teacher | student), 1 for KL(student | teacher), or between.
    temperature: float = 1.0  # Divides the logits of both.
    seq_len: int = 128
    steps: int = 300
    learning_rate: float = 3e-3
    warmup_steps: int = 30
    eval_every: int = 100
    run: train.RunOptions = train.RunOptions(Path("runs/distill"))


def make_student(config, teacher_directory, key, mesh):
    """Return the student, and the size of the vocabulary that both models have."""
    tokenizer = train.read_tokenizer(teacher_directory)
    if config.student is not None:
        directory = zoo.weights.resolve_directory(config.student)
        own = train.read_tokenizer(directory)
        if not have_equal_tokens(tokenizer, own):
            raise ValueError(f"{directory} has another tokenizer than {config.teacher}: their tokens do not compare")
        model = zoo.load(directory, mesh=mesh, dtype="float32")
        return config.mesh.apply(model), min(tokenizer.vocab, own.vocab)
    sizes = {"vocab": tokenizer.vocab, "embed": config.embed, "layers": config.layers, "heads": config.heads}

    def make(key):
        return config.mesh.apply(zoo.models.Transformer(**sizes, mlp=3 * config.embed, qk_norm=True, key=key))

    return zoo.init(make, key, mesh), tokenizer.vocab


def main(config: Config) -> None:
    if not (0 <= config.alpha <= 1 and 0 <= config.beta <= 1 and config.temperature > 0):
        raise ValueError(
            f"--alpha {config.alpha} --beta {config.beta}: expected numbers from 0 to 1, and --temperature "
            f"{config.temperature} above 0"
        )
    directory = train.resolve_start(config.teacher, Config.teacher, "python recipes/transformer.py")
    mesh = config.mesh.make_mesh()
    key, student_key = jax.random.split(jax.random.key(config.run.seed), 4)[:2]

    data = config.load_records(directory, config.data or read_standard_library(), kinds=("text", "chat", "completion"))
    batches = data.train.batches(config.batch_size, seed=config.run.seed, mesh=mesh)
    steps = config.steps if config.epochs is None else batches.count_steps(config.epochs)
    held_out = data.validation.ordered(config.batch_size, limit=16)

    teacher = config.mesh.apply(zoo.load(directory, mesh=mesh, dtype=config.mesh.dtype))
    model, vocab = make_student(config, directory, student_key, mesh)

    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def data_loss(model, batch):  # weights are 1 on what is trained on
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    def loss_fn(model, batch, teacher):
        if config.alpha == 1:
            return data_loss(model, batch)
        student = zoo.cast(model, config.mesh.dtype)
        terms = objectives.distillation_terms(
            student, teacher, batch, beta=config.beta, temperature=config.temperature, vocab=vocab
        )
        losses = config.alpha * -terms.log_probs + (1 - config.alpha) * terms.divergence
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = train.Evaluation(data_loss, mesh, unit=data.unit, validation=held_out)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch_and_teacher, model, opt_state):
        loss, grads = gradient(model, *batch_and_teacher)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config, mesh=mesh, data=data, model=model, frozen=teacher) as run:
        before = evaluate(model)
        goal = f"{evaluate(teacher)['validation']:.3f}"
        run.print_line(f"validation of the teacher: {goal} {data.unit}")
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, steps):
            model, opt_state, metrics = step((batch, teacher), model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)

    tools.report_run(
        run,
        "Distillation",
        model,
        before=before,
        headline={"validation of the teacher": goal},
        prompts=config.prompts or (train.find_prompts(data) if config.data else PROMPTS),
        key=key,
        export_seq_len=config.seq_len,
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
