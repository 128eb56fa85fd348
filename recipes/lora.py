"""Adapt a checkpoint with LoRA, or in 4 bits with QLoRA: a tenth of the parameters, nine tenths of the gain.

    python recipes/transformer.py                         # makes the checkpoint to start from, once
    python recipes/lora.py                                # 120 steps
    python recipes/lora.py --quantization nf4             # QLoRA: the frozen base in 4 bits, or in 8 with int8
    python recipes/lora.py --checkpoint ~/llama --data ~/books --seq-len 2048 --rank 16 --fsdp 8

On held-out text, English prose goes from 2.83 to 2.04 bits per byte, to 1.96 with `finetune.py --steps 120`. Parameters
and moments take 4.6 MB instead of 10.7; activations, which LoRA does not save, outweigh both at this size. In NF4 the
base takes 5.6 bits per parameter instead of 32, and prose goes from 2.85 to 2.22 with `--steps 60 --warmup-steps 6`;
without quantization to 2.22 with `--steps 60`, to 2.15 with `finetune.py --steps 60`.

Unlike finetune.py it wraps linear layers in adapters, W x + scale B A x (Hu et al., arXiv:2106.09685), and trains only
these, at a higher rate. With `--quantization` W is NF4 or int8, dequantized in each product (QLoRA, arXiv:2305.14314,
section 3). A checkpoint holds the adapters and a fingerprint of the frozen base. The run writes adapter/, for PEFT.
Replace `adapters.lora` by `dora`, `vera`, `loha`, ..., or give it `rank_stabilized=True` (rsLoRA): docs/adapters.md.
"""

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import equinox as eqx
import jax
import optax

import zoo
from zoo import adapters, tools, train

PROMPTS = ('The "with" statement\n', "An object is ", "When a function is called, ")


@dataclass(frozen=True)
class Config(train.TextConfig):  # batch_size, steps, learning_rate, ..., mesh, data, seq_len
    """Load, quantize, train an adapter, evaluate, sample, merge, export."""

    # Model to start from: a Hugging Face directory, or a name on the hub, NAME[@REVISION].
    checkpoint: Path = Path("runs/transformer/export")
    data: tuple[Path, ...] = ()
    """Files and directories of new text; by default Python's language reference, by topic."""
    # Text as the model was trained on, to measure forgetting; by default the standard library.
    pretraining_data: tuple[Path, ...] = ()
    quantization: Literal["none", "nf4", "int8"] = "none"  # Format of the base's linear layers.
    # Linear layers to adapt: ends of names, patterns, or all-linear for all but the head.
    targets: tuple[str, ...] = ("all-linear",)
    rank: int = 8  # Rank of B A, which is scaled by 2: alpha is 2 * rank.
    steps: int = 120
    epochs: float | None = None  # Passes over the training rows, instead of steps.
    learning_rate: float = 1e-2
    warmup_steps: int = 12
    eval_every: int = 40
    prompts: tuple[str, ...] = PROMPTS  # Texts to continue, before and after; the first is printed.
    mesh: train.MeshOptions = train.MeshOptions(remat="full")
    run: train.RunOptions = train.RunOptions(Path("runs/lora"))


def main(config: Config) -> None:
    checkpoint = train.resolve_start(config.checkpoint, Config.checkpoint, "python recipes/transformer.py")
    mesh = config.mesh.make_mesh()
    key = jax.random.key(config.run.seed)

    tokenizer = train.read_tokenizer(checkpoint)
    corpus = train.load_text(config.data or topics, tokenizer=tokenizer)
    old_corpus = train.load_text(config.pretraining_data, tokenizer=tokenizer)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)
    steps = config.steps if config.epochs is None else batches.count_steps(config.epochs)
    new = corpus.validation.ordered(config.seq_len, config.batch_size, limit=16)
    old = old_corpus.validation.ordered(config.seq_len, config.batch_size, limit=16)

    dtype = config.mesh.dtype if config.quantization == "none" else "float32"  # not rounded twice
    base = config.mesh.apply(zoo.load(checkpoint, mesh=mesh, dtype=dtype))
    if config.quantization != "none":
        base = zoo.place(adapters.quantize(base, config.quantization), mesh)
    model = adapters.lora(base, targets=config.targets, rank=config.rank, alpha=2 * config.rank, key=key)
    model = zoo.place(model, mesh)

    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, steps)
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

    with train.Run(config, mesh=mesh, data=corpus, model=model, best_metric="new", frozen=model) as run:
        before = evaluate(base)
        samples = train.continue_prompts(base, corpus, config.prompts, mesh=mesh, key=key)
        trainable, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
        model = eqx.combine(trainable, model)
        for batch in run.steps(batches, steps):
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model))
            if run.due(config.eval_every):
                run.save((zoo.trainable(model), opt_state), batches)

    tools.report_run(
        run,
        "LoRA on new text" if config.quantization == "none" else "QLoRA on new text",
        run.export_adapters(model, base=config.checkpoint),
        before=before,
        headline={"bits per parameter of the base": f"{zoo.inspect.measure_size(base).bits_per_parameter:.2f}"},
        samples=samples,
        prompts=config.prompts,
        key=key,
        export_seq_len=config.seq_len,
        parameters=zoo.trainable(model),
    )


if __name__ == "__main__":
    train.run_cli(main, Config)
