"""Adapt a checkpoint with DoRA, and measure how far rows of its matrices turn and how far they grow.

    python recipes/transformer.py                         # makes the checkpoint to start from, once
    python recipes/dora.py                                # 100 steps
    python recipes/dora.py --checkpoint ~/llama --data ~/books --seq-len 2048 --rank 16 --fsdp 8

On held-out text, English prose goes from 2.83 to 2.08 bits per byte, to 2.00 with `finetune.py --steps 100`. Matrices
whose rows full training turns further, it also scales further (a correlation of 0.89); DoRA hardly does (0.16).

Unlike lora.py it uses only the direction of each row of W + scale B A; its magnitude is a trainable parameter of its
own, initialized to that of W's row (Liu et al., arXiv:2402.09353). At the end it measures both as section 3.2 does.
"""

import functools
from pathlib import Path
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

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
    seq_len: int = 128,
    batch_size: int = 16,
    steps: int = 100,
    learning_rate: float = 1e-2,
    warmup_steps: int = 10,
    weight_decay: float = 0.1,
    eval_every: int = 50,
    mesh_options: train.MeshOptions = train.MeshOptions(remat="full"),
    run_options: train.RunOptions = train.RunOptions(Path("runs/dora")),
) -> None:
    """Load, train an adapter, evaluate, sample, merge, measure, export.

    Args:
        checkpoint: Directory of the model to start from: config.json, safetensors and tokenizer.json.
        data: Files and directories of new text; by default Python's language reference, by topic.
        pretraining_data: Text as the model was trained on, to measure forgetting; by default the standard library.
        targets: Linear layers to adapt: ends of names, patterns, or all-linear for all but the head.
        rank: Rank of B A.
        alpha: B A is scaled by alpha / rank.
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
    model = zoo.place(zoo.adapters.dora(base, targets=targets, rank=rank, alpha=alpha, key=key), mesh)
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
    if run.stopped:
        return
    zoo.adapters.save(model, run.directory / "adapter", base=checkpoint)
    merged = zoo.adapters.merge(model)
    moved = movements(zoo.load(checkpoint, mesh=mesh, dtype="float32"), merged)
    magnitudes, directions = np.array([*moved.values()]).T
    pairs = sorted(zip(directions, magnitudes, strict=True))
    points = tools.report.Curve("dora", [x for x, _ in pairs], [y for _, y in pairs])
    chart = tools.report.ScatterChart([points], unit="change of magnitude", x_label="change of direction")
    rows = [{"matrix": name, "magnitude": change[0], "direction": change[1]} for name, change in moved.items()]
    correlation = np.corrcoef(magnitudes, directions)[0, 1]
    tools.report_run(
        run,
        "DoRA on new text",
        merged,
        mesh,
        corpus,
        before=before,
        headline={"correlation of magnitude and direction": f"{correlation:.2f}"},
        samples=samples,
        prompts=PROMPTS,
        key=key,
        export_seq_len=seq_len,
        parameters=zoo.trainable(model),
        plots={"Magnitudes against directions, one point per matrix": chart},
        tables={"Changes": rows},
        recipe=main,
    )


def movements(before, after):
    """Per matrix that changed: the means over rows of |magnitude after - before| and of 1 - cosine(before, after)."""
    moved, get_weight = {}, lambda module: module.dense_weight
    for site, trained in zip(zoo.adapters.find_linears(before), zoo.adapters.find_linears(after), strict=True):
        get = functools.reduce(lambda get, _: eqx.filter_vmap(get), site.ranges, get_weight)  # layers, and experts
        old, new = get(site.module), get(trained.module)
        old_norm, new_norm = jnp.linalg.norm(old, axis=-1), jnp.linalg.norm(new, axis=-1)
        # 1 - cosine is half the squared distance of unit vectors, which is exactly 0 if nothing moved.
        turned = jnp.square(old / old_norm[..., None] - new / new_norm[..., None]).sum(-1) / 2
        grown, turned = (np.asarray(x.mean(-1)) for x in (jnp.abs(new_norm - old_norm), turned))
        moved |= {name: (float(grown[i]), float(turned[i])) for i, name in site.list_names().items() if turned[i] > 0}
    return moved


if __name__ == "__main__":
    train.run_cli(main)
