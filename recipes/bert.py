"""Train a masked language model on the Python standard library: 300 steps, a minute on two cores, 55% of bytes right.

    python recipes/bert.py                                # this machine's own library, byte by byte
    python recipes/bert.py --resume                       # after Ctrl-C; on another mesh too
    python recipes/bert.py --data ~/books --vocab 4096 --fsdp 2 --tensor 2 --out runs/bert-books

The objective is BERT's (arXiv:1810.04805), the layers are ModernBERT's (arXiv:2412.13663). A run's directory holds its
configuration, metrics, checkpoints, report.html with held-out text filled in, and export/, a Hugging Face directory.
"""

from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

import zoo
from zoo import tools, train

import optax


def mask_tokens(tokens, key, mask_token, vocab):
    """Choose 15% of the tokens as targets; replace 80% of them by the mask and 10% by random tokens, keep 10%."""
    target_key, change_key, token_key = jax.random.split(key, 3)
    is_target = jax.random.bernoulli(target_key, 0.15, tokens.shape) & (tokens != mask_token)
    change, other = jax.random.uniform(change_key, tokens.shape), jax.random.randint(token_key, tokens.shape, 0, vocab)
    changed = jnp.where(change < 0.8, mask_token, jnp.where(change < 0.9, other, tokens))
    return {"tokens": jnp.where(is_target, changed, tokens), "targets": jnp.where(is_target, tokens, -1)}


def main(
    *,
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 128,
    layers: int = 4,
    heads: int = 4,
    mlp_dim: int = 256,
    seq_len: int = 128,
    held_out: int = 64,
    batch_size: int = 16,
    steps: int = 300,
    learning_rate: float = 3e-3,
    warmup_steps: int = 30,
    weight_decay: float = 0.1,
    eval_every: int = 100,
    mesh_options: train.MeshOptions = train.MeshOptions(),
    run_options: train.RunOptions = train.RunOptions(Path("runs/bert")),
) -> None:
    """Train on masked text, evaluate, fill in held-out text, export.

    Args:
        data: Files and directories of text; by default this Python's standard library.
        vocab: 256 for bytes; more trains a byte-pair encoding on the text.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads, embed / heads wide each.
        mlp_dim: Width of the gated MLP.
        seq_len: Tokens per sequence.
        held_out: Sequences to evaluate on; a multiple of the devices that share the batch.
        batch_size: Sequences per step, over all devices.
        steps: Optimizer steps.
        learning_rate: Peak learning rate, after linear warmup; cosine decay to a tenth.
        warmup_steps: Steps of linear warmup, at most half of all.
        weight_decay: AdamW's, of matrices and embeddings.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, mesh, warmup_steps = dict(locals()), mesh_options.make_mesh(), min(warmup_steps, steps // 2)
    corpus, reader = train.load_text(data, vocab=vocab), zoo.parallel.reader(mesh)
    batches = corpus.train.batches(seq_len, batch_size, seed=run_options.seed, process=reader)
    model_key, mask_key, test_key = jax.random.split(jax.random.key(run_options.seed), 3)
    make = partial(zoo.models.ModernBERT, vocab=corpus.vocab, embed=embed, layers=layers, heads=heads, mlp=mlp_dim)
    model = zoo.init(lambda key: mesh_options.apply(make(key=key)), model_key, mesh)

    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = mesh_options.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw))
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
    mask_token = corpus.tokenizer.separator  # which begins documents, and is in none
    mask = jax.jit(lambda tokens, key: mask_tokens(tokens, key, mask_token, corpus.vocab))
    loss_fn = lambda model, batch: zoo.cross_entropy(zoo.cast(model, mesh_options.dtype), batch)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        gradient, scale = zoo.value_and_grad(loss_fn, mesh, **mesh_options.accumulation), train.loss_scale(opt_state)
        loss, grads = gradient(model, mask(*inputs), loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, metrics

    (rows,) = corpus.validation.ordered(seq_len, held_out, limit=1, process=reader)
    test = mask(zoo.place_batch(rows, mesh, vocab=corpus.vocab)["tokens"], test_key)
    evaluate = zoo.value(loss_fn, mesh)
    predict = zoo.spmd(lambda model, tokens: zoo.cast(model, mesh_options.dtype)(tokens), mesh, out="batch seq vocab")
    with train.Run(run_options, config=config) as run:
        run.print_line(f"{zoo.count(model):,} parameters on {mesh}; {corpus}")
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, steps, tokens=batch_size * seq_len):
            tokens = zoo.place_batch(batch, mesh, vocab=corpus.vocab)["tokens"]
            model, opt_state, metrics = step((tokens, jax.random.fold_in(mask_key, run.step)), model, opt_state)
            run.log(**metrics, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1))
            if run.due(eval_every):
                run.log(validation=evaluate(model, test))
                run.save((model, opt_state), batches)
    if run.stopped:
        return

    special = {f"{role}_token_id": mask_token for role in ("bos", "eos", "cls", "sep", "pad", "mask")}
    zoo.save(model, run_options.out / "export", config={**special, "max_position_embeddings": seq_len})
    arrays = test["tokens"], test["targets"], predict(model, test["tokens"]).argmax(-1)
    tokens, targets, guesses = multihost_utils.process_allgather(arrays, tiled=True)
    right = (guesses == targets)[targets >= 0].mean()
    result = f"{right:.1%} of the masked tokens right in {held_out} held-out sequences after {steps} steps on {mesh}"
    if jax.process_index() == 0:
        corpus.tokenizer.save(run_options.out / "export")
        show = lambda i, j: "█" if targets[i, j] >= 0 else corpus.decode(tokens[i, j : j + 1])
        holes, filled = lambda i: "".join(show(i, j) for j in range(seq_len)), jnp.where(targets < 0, tokens, guesses)
        samples = [(holes(i), "\n\n" + corpus.decode(filled[i])) for i in range(min(held_out, 6))]
        path = tools.report.write_report(
            run_options.out,
            title="A masked language model from scratch",
            model=tools.report.describe_model(model),
            summary=result,
            curves={"loss": "training", "validation": "held out"},
            unit="nats per masked token",
            samples=samples,
            parameters=tools.report.tabulate_parameters(model, mesh),
        )
        print(f"\n{result}\nwrote the report to {path}")


if __name__ == "__main__":
    train.run_cli(main)
