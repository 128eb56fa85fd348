"""Fine-tune a checkpoint on new text: a Transformer trained on Python's sources learns its language reference.

    python recipes/transformer.py                         # makes the checkpoint to start from, once
    python recipes/finetune.py                            # 200 steps, a minute on two cores
    python recipes/finetune.py --resume                   # after Ctrl-C; on another mesh too
    python recipes/finetune.py --checkpoint ~/llama --data ~/books --seq-len 2048 --learning-rate 2e-5 --fsdp 8

Data are files of text; sft.py trains on chats and other records, in JSON lines or Parquet.

On held-out text, English prose goes from 2.83 to 1.82 bits per byte, and the sources, which are forgotten, from 2.29 to
2.66. Unlike transformer.py it starts from a Hugging Face directory, of any family that zoo.load reads, with its
tokenizer.json; it trains for fewer steps at a third of the rate, and evaluates and samples before and after.
"""

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import equinox as eqx
import jax
import optax

import zoo
from zoo import tools, train

TITLE = "A checkpoint on new text"
START = Path("runs/transformer/export")  # where transformer.py exports its model by default
PROMPTS = ('The "with" statement\n', "An object is ", "When a function is called, ")


@dataclass(frozen=True)
class Config:
    """Load, train all parameters on new text, evaluate, sample, export."""

    checkpoint: Path = START  # Model to start from: a Hugging Face directory, or a name on the hub, NAME[@REVISION].
    data: tuple[Path, ...] = ()  # Files and directories of new text; by default Python's language reference, by topic.
    # Text as the model was trained on, to measure forgetting; by default the standard library.
    pretraining_data: tuple[Path, ...] = ()
    seq_len: int = 128  # Tokens per sequence.
    batch_size: int = 16  # Sequences per step, over all devices.
    steps: int = 200  # Optimizer steps.
    epochs: float | None = None  # Passes over the training rows, instead of steps.
    learning_rate: float = 1e-3  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 20  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.1  # AdamW's, of matrices and embeddings.
    eval_every: int = 50  # Steps between evaluations, each with a checkpoint.
    prompts: tuple[str, ...] = PROMPTS  # Texts to continue, before and after; the first is printed.
    mesh: train.MeshOptions = train.MeshOptions(remat="full")
    run: train.RunOptions = train.RunOptions(Path("runs/finetune"))


def main(config: Config) -> None:
    if config.checkpoint == START and not START.exists():
        raise FileNotFoundError(f"{START}: no model there; `python recipes/transformer.py` makes one")
    checkpoint = zoo.weights.resolve_directory(config.checkpoint)
    mesh = config.mesh.make_mesh()
    key = jax.random.key(config.run.seed)

    tokenizer = train.read_tokenizer(checkpoint)
    corpus = train.load_text(config.data or topics, tokenizer=tokenizer)
    old_corpus = train.load_text(config.pretraining_data, tokenizer=tokenizer)
    reader = zoo.parallel.reader(mesh)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, process=reader)
    steps = config.steps if config.epochs is None else batches.count_steps(config.epochs)
    new = corpus.validation.ordered(config.seq_len, config.batch_size, limit=16)
    old = old_corpus.validation.ordered(config.seq_len, config.batch_size, limit=16)

    model = zoo.load(checkpoint, mesh=mesh, dtype="float32")
    model = config.mesh.apply(model)

    peak = config.learning_rate
    warmup = min(config.warmup_steps, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = train.Evaluation(loss_fn, mesh, new=new, old=old)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        metrics = {"bits_per_byte": train.bits_per_byte(loss, corpus.train), "gradient_norm": optax.tree.norm(grads)}
        return model, opt_state, metrics

    tokens = config.batch_size * config.seq_len
    flops = 6 * tokens * zoo.count(model)
    with train.Run(config.run, config=config, best_metric="new") as run:
        run.print_line(f"{zoo.count(model):,} parameters from {config.checkpoint} on {mesh}; {corpus}; {batches}")
        before = evaluate(model)
        samples = train.continue_prompts(model, corpus, config.prompts, mesh=mesh, key=key)
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, steps, tokens=tokens, flops=flops):
            batch = zoo.place_batch(batch, mesh, vocab=corpus.vocab)
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model))
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)

    tools.report_run(
        run,
        TITLE,
        model,
        mesh,
        corpus,
        config=config,
        before=before,
        samples=samples,
        prompts=config.prompts,
        key=key,
        export_seq_len=config.seq_len,
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
