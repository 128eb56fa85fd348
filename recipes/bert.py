"""Train a masked language model on the Python standard library: 300 steps, a minute on two cores, 53% of bytes right.

    python recipes/bert.py                                # this machine's own library, byte by byte
    python recipes/bert.py --resume                       # after Ctrl-C; on another mesh too
    python recipes/bert.py --data ~/books --vocab 4096 --fsdp 2 --tensor 2 --out runs/bert-books

The objective is BERT's (arXiv:1810.04805), the layers are ModernBERT's (arXiv:2412.13663). A run's directory holds its
configuration, metrics, checkpoints, report.html with held-out text filled in, and export/, a Hugging Face directory.
"""

from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.experimental import multihost_utils

import zoo
from zoo import tools, train

TITLE = "A masked language model from scratch"


@dataclass(frozen=True)
class Config:
    """Train on masked text, evaluate, fill in held-out text, export."""

    data: tuple[Path, ...] = ()  # Files and directories of text; by default this Python's standard library.
    vocab: int = 256  # 256 for bytes; more trains a byte-pair encoding on the text.
    embed: int = 128  # Width of the residual stream.
    layers: int = 4  # Number of blocks.
    heads: int = 4  # Attention heads, embed / heads wide each.
    mlp_dim: int = 256  # Width of the gated MLP.
    seq_len: int = 128  # Tokens per sequence.
    held_out: int = 64  # Sequences to evaluate on; a multiple of the devices that share the batch.
    batch_size: int = 16  # Sequences per step, over all devices.
    steps: int = 300  # Optimizer steps.
    learning_rate: float = 3e-3  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 30  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.1  # AdamW's, of matrices and embeddings.
    eval_every: int = 100  # Steps between evaluations, each with a checkpoint.
    mesh: train.MeshOptions = train.MeshOptions()
    run: train.RunOptions = train.RunOptions(Path("runs/bert"))


def mask_tokens(tokens, key, mask_token, vocab):
    """Choose 15% of the tokens as targets; replace 80% of them by the mask and 10% by random tokens, keep 10%."""
    target_key, change_key, token_key = jax.random.split(key, 3)
    is_target = jax.random.bernoulli(target_key, 0.15, tokens.shape) & (tokens != mask_token)
    change = jax.random.uniform(change_key, tokens.shape)
    other = jax.random.randint(token_key, tokens.shape, 0, vocab)
    changed = jnp.where(change < 0.8, mask_token, jnp.where(change < 0.9, other, tokens))
    return {"tokens": jnp.where(is_target, changed, tokens), "targets": jnp.where(is_target, tokens, -1)}


def main(config: Config) -> None:
    mesh = config.mesh.make_mesh()
    model_key, mask_key, test_key = jax.random.split(jax.random.key(config.run.seed), 3)

    corpus = train.load_text(config.data, vocab=config.vocab)
    reader = zoo.parallel.reader(mesh)
    batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, process=reader)
    mask_token = corpus.tokenizer.separator  # which begins documents, and is in none

    @jax.jit
    def mask(tokens, key):
        return mask_tokens(tokens, key, mask_token, corpus.vocab)

    (rows,) = corpus.validation.ordered(config.seq_len, config.held_out, limit=1, process=reader)
    rows = zoo.place_batch(rows, mesh, vocab=corpus.vocab)
    test = mask(rows["tokens"], test_key)

    def make_model(key):
        model = zoo.models.ModernBERT(
            vocab=corpus.vocab,
            embed=config.embed,
            layers=config.layers,
            heads=config.heads,
            mlp=config.mlp_dim,
            key=key,
        )
        return config.mesh.apply(model)

    model = zoo.init(make_model, model_key, mesh)

    peak = config.learning_rate
    warmup = min(config.warmup_steps, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = zoo.value(loss_fn, mesh)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        tokens, key = inputs
        loss, grads = gradient(model, mask(tokens, key))
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
        return model, opt_state, metrics

    with train.Run(config.run, config=config) as run:
        run.print_line(f"{zoo.count(model):,} parameters on {mesh}; {corpus}")
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps, tokens=config.batch_size * config.seq_len):
            batch = zoo.place_batch(batch, mesh, vocab=corpus.vocab)
            key = jax.random.fold_in(mask_key, run.step)
            model, opt_state, metrics = step((batch["tokens"], key), model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.due(config.eval_every):
                run.log(validation=evaluate(model, test))
                run.save((model, opt_state), batches)
    if run.stopped:
        return

    special = {f"{role}_token_id": mask_token for role in ("bos", "eos", "cls", "sep", "pad", "mask")}
    zoo.save(model, config.run.out / "export", config={**special, "max_position_embeddings": config.seq_len})
    guesses = predict(model, test["tokens"], mesh, config.mesh.dtype)
    tokens, targets, guesses = multihost_utils.process_allgather((test["tokens"], test["targets"], guesses), tiled=True)
    if jax.process_index() == 0:
        corpus.tokenizer.save(config.run.out / "export")
        report(config, model, mesh, corpus, tokens, targets, guesses)


def predict(model, tokens, mesh, dtype):
    """Return the likeliest token at each place."""

    def get_logits(model, tokens):
        return zoo.cast(model, dtype)(tokens)

    return zoo.spmd(get_logits, mesh, out="batch seq vocab")(model, tokens).argmax(-1)


def report(config, model, mesh, corpus, tokens, targets, guesses):
    """Write report.html, with held-out sequences masked and filled in."""
    is_target = targets >= 0
    filled = jnp.where(is_target, guesses, tokens)
    samples = []
    for row in range(min(config.held_out, 6)):
        letters = [corpus.decode(tokens[row, place : place + 1]) for place in range(config.seq_len)]
        masked = "".join("█" if is_target[row, place] else letter for place, letter in enumerate(letters))
        samples.append((masked, "\n\n" + corpus.decode(filled[row])))
    right = (guesses == targets)[is_target].mean()
    summary = f"{right:.1%} of the masked tokens right in {config.held_out} held-out sequences"
    summary += f" after {config.steps} steps on {mesh}"
    path = tools.report.write_report(
        config.run.out,
        title=TITLE,
        model=tools.report.describe_model(model),
        summary=summary,
        curves={"loss": "training", "validation": "held out"},
        unit="nats per masked token",
        samples=samples,
        parameters=tools.report.tabulate_parameters(model, mesh),
    )
    print(f"\n{summary}\nwrote the report to {path}")


if __name__ == "__main__":
    train.run_cli(main, Config)
