"""Adapt a checkpoint with LoRA: a tenth of the parameters, nine tenths of the gain.

    python recipes/transformer.py                         # makes the checkpoint to start from, once
    python recipes/lora.py                                # 120 steps
    python recipes/lora.py --checkpoint ~/llama --data ~/books --seq-len 2048 --rank 16 --fsdp 8

On held-out text, English prose goes from 2.83 to 2.04 bits per byte, to 1.96 with `finetune.py --steps 120`. Parameters
and moments take 4.6 MB instead of 10.7; activations, which LoRA does not save, outweigh both at this size.

Unlike finetune.py it wraps linear layers in adapters, W x + scale B A x (Hu et al., arXiv:2106.09685), and trains these
alone, at a higher rate. A checkpoint holds them and a fingerprint of the frozen base. It writes adapter/, for PEFT.
"""

from pathlib import Path
from pydoc_data.topics import topics

import equinox as eqx
import jax

import zoo
from zoo import tools, train

import optax

START = Path("runs/transformer/export")  # where transformer.py exports its model by default
PROMPTS = ['The "with" statement\n', "An object is ", "When a function is called, "]


def main(
    *,
    checkpoint: Path = START,
    data: tuple[Path, ...] = (),
    pretraining_data: tuple[Path, ...] = (),
    targets: tuple[str, ...] = ("all-linear",),
    rank: int = 8,
    alpha: float = 16.0,
    rank_stabilized: bool = False,
    seq_len: int = 128,
    batch_size: int = 16,
    steps: int = 120,
    learning_rate: float = 1e-2,
    warmup_steps: int = 12,
    weight_decay: float = 0.1,
    eval_every: int = 40,
    mesh_options: train.MeshOptions = train.MeshOptions(remat="full"),
    run_options: train.RunOptions = train.RunOptions(Path("runs/lora")),
) -> None:
    """Load, train an adapter, evaluate, sample, merge, export.

    Args:
        checkpoint: Directory of the model to start from: config.json, safetensors and tokenizer.json.
        data: Files and directories of new text; by default Python's language reference, by topic.
        pretraining_data: Text as the model was trained on, to measure forgetting; by default the standard library.
        targets: Linear layers to adapt: ends of names, patterns, or all-linear for all but the head.
        rank: Rank of B A.
        alpha: B A is scaled by alpha / rank.
        rank_stabilized: Scale by alpha / sqrt(rank) instead (rsLoRA).
        seq_len: Tokens per sequence.
        batch_size: Sequences per step, over all devices.
        steps: Optimizer steps.
        learning_rate: Peak learning rate, after linear warmup; cosine decay to a tenth.
        warmup_steps: Steps of linear warmup, at most half of all.
        weight_decay: AdamW's, of matrices.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, mesh, warmup_steps = dict(locals()), mesh_options.make_mesh(), min(warmup_steps, steps // 2)
    if not (checkpoint / "config.json").exists():
        raise FileNotFoundError(f"{checkpoint}: no model there; `python recipes/transformer.py` makes one in {START}")
    tokenizer, key = train.read_tokenizer(checkpoint), jax.random.key(run_options.seed)
    corpus, old_corpus = (train.load_text(text, tokenizer=tokenizer) for text in (data or topics, pretraining_data))
    batches = corpus.train.batches(seq_len, batch_size, seed=run_options.seed, process=zoo.parallel.reader(mesh))
    base = mesh_options.apply(zoo.load(checkpoint, mesh=mesh, dtype="float32"))
    options = {"targets": targets, "rank": rank, "alpha": alpha, "rank_stabilized": rank_stabilized}
    model = zoo.place(zoo.adapters.lora(base, **options, key=key), mesh)
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = mesh_options.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw))
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, mesh_options.dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        scale = train.loss_scale(opt_state)
        loss, grads = zoo.value_and_grad(loss_fn, mesh, **mesh_options.accumulation)(model, batch, loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        metrics = {"bits_per_byte": train.bits_per_byte(loss, corpus.train), "gradient_norm": optax.tree.norm(grads)}
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, metrics

    new, old = (text.validation.ordered(seq_len, batch_size, limit=16) for text in (corpus, old_corpus))
    evaluate = train.Evaluation(loss_fn, mesh, new=new, old=old)
    with train.Run(run_options, config=config, best_metric="new", frozen=model) as run:
        run.print_line(f"{zoo.count(model):,} of {zoo.count(base):,} parameters trainable on {mesh}; {corpus}")
        before, samples = evaluate(base), train.continue_prompts(base, corpus, PROMPTS, mesh=mesh, key=key)
        trainable, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
        model = eqx.combine(trainable, model)
        for batch in run.steps(batches, steps, tokens=batch_size * seq_len):
            model, opt_state, metrics = step(zoo.place_batch(batch, mesh, vocab=corpus.vocab), model, opt_state)
            run.log(**metrics, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1))
            if run.every(eval_every):
                run.log(**evaluate(model))
            if run.due(eval_every):
                run.save((zoo.trainable(model), opt_state), batches)
    zoo.adapters.save(model, run.directory / "adapter", base=checkpoint)
    tools.report_run(
        run,
        "LoRA on new text",
        zoo.adapters.merge(model),
        mesh,
        corpus,
        before=before,
        samples=samples,
        prompts=PROMPTS,
        key=key,
        export_seq_len=seq_len,
        parameters=zoo.trainable(model),
        recipe=main,
    )


if __name__ == "__main__":
    train.run_cli(main)
