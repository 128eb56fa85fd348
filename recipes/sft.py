"""Supervised fine-tuning: a checkpoint learns to answer from chats, with all of its parameters or with LoRA.

    python recipes/transformer.py                         # makes the checkpoint to start from, once
    python recipes/sft.py                                 # 120 steps on questions about Python's standard library
    python recipes/sft.py --checkpoint Qwen/Qwen3-0.6B --data chats.jsonl --seq-len 2048 --learning-rate 1e-5
    python recipes/sft.py --checkpoint Qwen/Qwen3-0.6B --data chats.jsonl --seq-len 2048 --learning-rate 1e-4 --lora 16
    python recipes/sft.py ... --lora 16 --quantization nf4  # QLoRA: the frozen base in 4 bits

By default the loss on held-out questions falls from 2.03 to 1.42 nats per trained token in a minute on two cores: the
answers have the look of docstrings, and not their sense.

Only what the assistant writes is trained on: the chat template, or the records, say which tokens these are, and `zoo
data show` colors them. The loss is the mean over all trained tokens of a batch, whatever the rows, devices and
micro-batches that hold them. Unlike finetune.py it packs whole texts into rows, where segments keep them apart.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import optax

import zoo
from zoo import tools, train
from zoo.text.tasks.docstrings import read_docstrings

START = Path("runs/transformer/export")  # where transformer.py exports its model by default
PROMPTS = (
    "What does `json.dumps` do?",
    "What does `pathlib.Path.exists` do?",
    "What does `random.shuffle` do?",
)


@dataclass(frozen=True)
class Config:
    """Load a model and records, train on the answers, evaluate, chat before and after, export."""

    checkpoint: Path = START  # Model to start from: a Hugging Face directory, or a name on the hub, NAME[@REVISION].
    # JSON lines, Parquet, datasets on disk or of the hub (org/name:split): files, folders, patterns, PATH=WEIGHT to
    # mix; by default questions about Python's standard library.
    data: tuple[str, ...] = ()
    records: train.RecordOptions = train.RecordOptions()
    lora: int = 0  # Rank of LoRA adapters; 0 trains all parameters.
    # Linear layers to adapt: ends of names, patterns, or all-linear for all but the head.
    targets: tuple[str, ...] = ("all-linear",)
    quantization: Literal["none", "nf4", "int8"] = "none"  # With lora, format of the base's linear layers.
    seq_len: int = 256  # Tokens per row, of one or several texts.
    batch_size: int = 16  # Rows per step, over all devices.
    steps: int = 120  # Optimizer steps.
    epochs: float | None = None  # Passes over the training rows, instead of steps.
    learning_rate: float = 1e-3  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 20  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.1  # AdamW's, of matrices and embeddings.
    eval_every: int = 40  # Steps between evaluations, each with a checkpoint.
    # Questions to answer, before and after; the first is printed. By default, of `data` held-out ones.
    prompts: tuple[str, ...] = ()
    mesh: train.MeshOptions = train.MeshOptions(remat="full")
    run: train.RunOptions = train.RunOptions(Path("runs/sft"))


def main(config: Config) -> None:
    if config.checkpoint == START and not START.exists():
        raise FileNotFoundError(f"{START}: no model there; `python recipes/transformer.py` makes one")
    if config.quantization != "none" and not config.lora:
        raise ValueError(
            f"--quantization {config.quantization} freezes the base: add --lora 16 to train adapters of it"
        )
    checkpoint = zoo.weights.resolve_directory(config.checkpoint)
    mesh = config.mesh.make_mesh()
    key = jax.random.key(config.run.seed)

    tokenizer = train.read_tokenizer(checkpoint)
    template = config.records.read_template(checkpoint, tokenizer)
    source = config.data or read_docstrings()
    reading = {"tokenizer": tokenizer, "template": template, "seq_len": config.seq_len}
    data = config.records.load(source, kinds=("text", "chat", "completion"), **reading)
    batches = data.train.batches(config.batch_size, seed=config.run.seed, process=zoo.parallel.reader(mesh))
    steps = config.steps if config.epochs is None else batches.count_steps(config.epochs)
    held_out = data.validation.ordered(config.batch_size, limit=16)
    prompts = config.prompts or (train.find_prompts(data) if config.data else PROMPTS)

    is_frozen = config.lora and config.quantization == "none"  # what is quantized is not rounded first
    dtype = config.mesh.dtype if is_frozen else "float32"
    base = config.mesh.apply(zoo.load(checkpoint, mesh=mesh, dtype=dtype))
    if config.quantization != "none":
        base = zoo.place(zoo.adapters.quantize(base, config.quantization), mesh)
    model = base
    if config.lora:
        model = zoo.adapters.lora(base, targets=config.targets, rank=config.lora, alpha=2 * config.lora, key=key)
        model = zoo.place(model, mesh)

    peak = config.learning_rate
    warmup = min(config.warmup_steps, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):  # weights are 1 on the tokens of answers
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = train.Evaluation(loss_fn, mesh, unit=data.unit, validation=held_out)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config.run, config=config, frozen=model if config.lora else None) as run:
        run.print_line(f"{zoo.count(model):,} trained parameters of {config.checkpoint} on {mesh}\n{data}\n{batches}")
        before = evaluate(model)
        samples = train.continue_prompts(model, data, prompts, mesh=mesh, key=key)
        trainable, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
        model = eqx.combine(trainable, model)
        for batch in run.steps(batches, steps, tokens=config.batch_size * config.seq_len):
            batch = zoo.place_batch(batch, mesh, vocab=data.vocab)
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model))
            if run.due(config.eval_every):
                run.save((zoo.trainable(model), opt_state), batches)

    parameters = zoo.trainable(model)
    if config.lora:
        zoo.adapters.save(model, run.directory / "adapter", base=config.checkpoint)
        data.save(run.directory / "adapter")
        model = zoo.adapters.merge(model, quantized="decode")
    tools.report_run(
        run,
        "Supervised fine-tuning",
        model,
        mesh,
        data,
        config=config,
        before=before,
        samples=samples,
        prompts=prompts,
        key=key,
        export_seq_len=config.seq_len,
        parameters=parameters,
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
