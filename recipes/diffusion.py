"""Compare diffusion language models with an autoregressive one: bounds of 3.60 and 3.86 bits per byte against 2.44.

    python recipes/diffusion.py                           # three runs, 94 seconds on two cores
    python recipes/diffusion.py --runs block --block 4 --block-steps 2 --out runs/blocks-of-4
    python recipes/diffusion.py --embed 512 --layers 12 --heads 8 --mlp-dim 1536 --seq-len 1024 --steps 20000 --fsdp 8

- autoregressive: predicts each token from those before it;
- masked: predicts masked tokens of the whole row from the others (LLaDA, arXiv:2502.09992);
- block: the same in blocks of `--block` tokens, each after those before it (BD3-LM, arXiv:2503.09573).

All are one Transformer of equal size on equal text, with other attention while it trains. The losses of diffusion are
upper bounds. The report has curves, bounds, and samples while they are filled in. docs/diffusion.md has the results.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import zoo
from zoo import tools, train
from zoo.layers import TokenInfo
from zoo.ops.attention import AttentionMask, attention
from zoo.parallel import all_gather, scan

Variant = Literal["autoregressive", "masked", "block"]
RUNS: tuple[Variant, ...] = get_args(Variant)
PROMPTS = ("def main(", "class Node:\n    ", "import os\n")


@dataclass(frozen=True)
class Config(train.ModelConfig):  # batch_size, steps, learning_rate, ..., mesh, data, seq_len, vocab, embed, ...
    """Train each variant, compare their bounds, sample."""

    runs: tuple[Variant, ...] = RUNS  # Variants to train.
    learning_rate: float = 6e-3
    block: int = 16  # Tokens of a block, in its run; a divisor of seq_len.
    draws: int = 4  # Draws of masks for the bound on held-out text.
    block_steps: int = 8  # Steps that fill in `block` tokens of a sample, at most one per token.
    # Which masked tokens of a sample are filled in first: any, or those that the model is most confident of.
    order: Literal["random", "confidence"] = "random"
    temperature: float = 0.7  # Of samples; 0 for the likeliest token.
    run: train.RunOptions = train.RunOptions(Path("runs/diffusion"))


def mask_tokens(batch, key, *, block, mask_token):
    """Return rows of clean tokens and then targets, of which n in each block are masked, with weight block / n.

    n is uniform from 1 to block, spread evenly over the blocks of the batch (Kingma et al., arXiv:2107.00630, appendix
    I.1). The weights of the masked tokens of a block sum to its length. No target sees the clean tokens of the last
    block, which are left out.
    """
    rows, length = batch["targets"].shape
    level_key, order_key = jax.random.split(key)
    blocks = (rows, length // block, block)
    levels = jax.random.uniform(level_key) + jnp.arange(rows * length // block) / (rows * length // block)
    counts = 1 + jnp.floor(block * (levels % 1)).astype(int).reshape(*blocks[:2], 1)
    ranks = jax.random.uniform(order_key, blocks).argsort(-1).argsort(-1)
    is_masked = (ranks < counts).reshape(rows, length)
    weights = jnp.broadcast_to(block / counts, blocks).reshape(rows, length)
    clean = batch["tokens"][:, : length - block + 1]
    positions = jnp.concatenate([jnp.arange(clean.shape[1]), 1 + jnp.arange(length)])
    return {
        "tokens": jnp.concatenate([clean, jnp.where(is_masked, mask_token, batch["targets"])], axis=1),
        "targets": jnp.concatenate([jnp.full_like(clean, -1), jnp.where(is_masked, batch["targets"], -1)], axis=1),
        "weights": jnp.concatenate([jnp.zeros(clean.shape), weights * batch["weights"]], axis=1),
        "positions": jnp.broadcast_to(positions, (rows, len(positions))),
    }


def attend_in_blocks(query, key, value, mask, *, block, **options):
    """Attend in a row of `mask_tokens`: a clean token to those before it, a target to its block and to clean ones
    before that. `mask` is not read: these rows have no padding."""
    length = (query.shape[1] + block - 1) // 2
    clean = jnp.arange(length - block + 1)
    first = jnp.arange(length) // block * block  # of the targets of each block; the clean token there is before them
    sees_clean = jnp.concatenate([clean, first])[:, None] >= clean
    sees_target = jnp.concatenate([jnp.full_like(clean, -1), first])[:, None] == first
    selected = jnp.concatenate([sees_clean, sees_target], axis=1)
    selected = jnp.broadcast_to(selected, (len(query), *selected.shape))
    return attention(query, key, value, AttentionMask(False, selected=selected), **options)


def fill_in(model, rows, key, *, block, steps, order, mask_token, temperature):
    """Fill in the masked tokens of rows, block after block, as many in each of `steps` steps.

    Tokens of earlier blocks are in a KV cache, the tokens of a block look ahead to its end. Return the rows, and the
    number of the step that filled in each token, 0 in the prompt.
    """
    count, length = rows.shape
    first = jnp.zeros((count, 1), jnp.int32)
    _, states = model.hidden(rows[:, :1], TokenInfo(first), model.init_state(count, length))
    places = jnp.arange(block)

    def fill_block(states, inputs):
        number, tokens = inputs
        positions = jnp.broadcast_to(1 + number * block + places, tokens.shape)
        lookahead = jnp.broadcast_to(block - 1 - places, tokens.shape)

        def fill_some(carry, step):
            tokens, filled = carry
            hidden, _ = model.hidden(tokens, TokenInfo(positions, lookahead=lookahead), states)
            logits = all_gather(model.logits(hidden.x).astype(jnp.float32), "vocab", axis=2)
            logits = logits.at[..., mask_token].set(-jnp.inf)
            total = number * steps + step
            token_keys, order_keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, total)))(key).T
            noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(token_keys)
            guesses = (logits + temperature * noise).argmax(-1)
            if order == "confidence":
                priority = jnp.take_along_axis(jax.nn.log_softmax(logits), guesses[..., None], axis=-1)[..., 0]
            else:
                priority = jax.vmap(lambda key: jax.random.uniform(key, (block,)))(order_keys)
            is_masked = tokens == mask_token
            ranks = jnp.where(is_masked, -priority, jnp.inf).argsort(-1).argsort(-1)
            share = jnp.ceil(is_masked.sum(-1, keepdims=True) / (steps - step))
            is_filled = is_masked & (ranks < share)
            return (jnp.where(is_filled, guesses, tokens), jnp.where(is_filled, total + 1, filled)), None

        (tokens, filled), _ = scan(fill_some, (tokens, jnp.zeros_like(tokens)), jnp.arange(steps))
        _, states = model.hidden(tokens, TokenInfo(positions), states)
        return states, (tokens, filled)

    blocks = rows[:, 1:].reshape(count, -1, block).swapaxes(0, 1)
    _, filled = scan(fill_block, states, (jnp.arange(len(blocks)), blocks))
    tokens, numbers = (x.swapaxes(0, 1).reshape(count, -1) for x in filled)
    return jnp.concatenate([rows[:, :1], tokens], axis=1), jnp.concatenate([first, numbers], axis=1)


def choose_method(config, name, mask_token):
    """Return the attention of a variant's training, and how it changes a batch."""
    if name == "autoregressive":
        return "auto", keep_tokens
    block = find_block(config, name)
    mask = partial(mask_tokens, block=block, mask_token=mask_token)
    return partial(attend_in_blocks, block=block), mask


def keep_tokens(batch, key):
    return batch


def find_block(config, name):
    return config.seq_len if name == "masked" else config.block


def make_model(config, vocab, attend, key):
    sizes = {"vocab": vocab, "embed": config.embed, "layers": config.layers, "heads": config.heads}
    model = zoo.models.Transformer(**sizes, mlp=config.mlp_dim, qk_norm=True, key=key)
    return zoo.configure(config.mesh.apply(model), attention=attend)


def check(config):
    train.check_names("runs", config.runs, RUNS)
    if config.block < 1 or config.seq_len % config.block or not 1 <= config.block_steps <= config.block:
        raise ValueError(
            f"a block of {config.block} tokens, filled in {config.block_steps} steps, in rows of {config.seq_len}: "
            "--block is a divisor of --seq-len, and --block-steps is from 1 to --block"
        )
    if config.mesh.pipe > 1 or config.mesh.context > 1 or config.mesh.attention != "auto":
        raise ValueError(
            "rows of clean and masked tokens need their own attention: leave out --pipe, --context, --attention"
        )


def main(config: Config) -> None:
    check(config)
    mesh = config.mesh.make_mesh()
    model_key, mask_key, test_key, sample_key = jax.random.split(jax.random.key(config.run.seed), 4)
    corpus = train.load_text(config.data, vocab=config.vocab)
    mask_token = corpus.tokenizer.separator  # it begins texts, and is not sampled
    held_out = corpus.validation.ordered(config.seq_len, config.batch_size, limit=8, process=zoo.parallel.reader(mesh))

    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = zoo.value(loss_fn, mesh)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        change, batch, key = inputs
        loss, grads = gradient(model, change(batch, key))
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        metrics = {"bits_per_byte": train.bits_per_byte(loss, corpus.train), "gradient_norm": optax.tree.norm(grads)}
        return model, opt_state, metrics

    placed = [zoo.place_batch(batch, mesh, vocab=corpus.vocab) for batch in held_out]
    rows = []
    samples = []
    for name in config.runs:
        attend, change = choose_method(config, name, mask_token)
        model = zoo.init(partial(make_model, config, corpus.vocab, attend), model_key, mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)
        draws = draw_masks(config, name, jax.jit(change), placed, test_key)

        with train.Run(config, name=name, mesh=mesh, data=corpus, model=model) as run:
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, config.steps):
                inputs = (change, batch, jax.random.fold_in(mask_key, run.step))
                model, opt_state, metrics = step(inputs, model, opt_state)
                run.log(**metrics, learning_rate=schedule(run.step - 1))
                if run.every(config.eval_every):
                    run.log(**measure(evaluate, model, draws, corpus.validation))
                if run.due(config.eval_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return
        rows.append(tabulate(config, name, draws[0][0], train.summary(run.directory)))
        samples += sample(config, name, zoo.configure(model, attention="auto"), corpus, mesh, sample_key)

    tools.report_runs(
        config,
        "Diffusion and autoregressive language models",
        rows,
        description=f"Held-out text after {config.steps} steps on {mesh}; of diffusion, upper bounds",
        tokens_per_step=config.batch_size * config.seq_len,
        samples=samples,
    )


def draw_masks(config, name, change, batches, key):
    """Return held-out batches with several draws of masks; one draw for the autoregressive model, which has none."""
    count = 1 if name == "autoregressive" else config.draws
    return [[change(batch, key) for batch in batches] for key in jax.random.split(key, count)]


def measure(evaluate, model, draws, text):
    """Return the mean over draws of masks of bits per byte of held-out text, and their spread."""
    losses = [np.mean([evaluate(model, test) for test in tests]) for tests in draws]
    bounds = [float(train.bits_per_byte(float(loss), text)) for loss in losses]
    return {"validation": sum(bounds) / len(bounds), "spread": max(bounds) - min(bounds)}


def tabulate(config, name, test, last):
    return {
        "run": name,
        "bits per byte": last["validation"],
        "spread of draws": last["spread"],
        "computed per token": test["tokens"].shape[1] / config.seq_len,
        "tokens/s": round(last["tokens_per_second"]),
    }


def sample(config, name, model, corpus, mesh, key):
    """Continue the prompts; of diffusion, show the first one also while it is filled in."""
    options = {"temperature": config.temperature, "key": key}
    if name == "autoregressive":
        pairs = train.continue_prompts(model, corpus, PROMPTS, mesh=mesh, max_new_tokens=config.seq_len, **options)
        return [(f"{name}: {prompt}", text) for prompt, text in pairs]
    mask_token = corpus.tokenizer.separator
    prompts = [corpus.encode_prompt(prompt)[: config.seq_len] for prompt in PROMPTS]
    rows = np.full((len(prompts), 1 + config.seq_len), mask_token, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    count = -(-len(prompts) // config.batch_size) * config.batch_size  # the mesh divides a batch
    rows = np.resize(rows, (count, rows.shape[1]))  # the same prompts again and again
    rows = zoo.place_batch({"tokens": rows}, mesh, vocab=corpus.vocab)["tokens"]
    block = find_block(config, name)
    steps = config.block_steps * block // config.block
    fill = partial(fill_in, block=block, steps=steps, order=config.order, mask_token=mask_token)
    fill = partial(fill, temperature=config.temperature)
    found = zoo.spmd(fill, mesh, out=("batch seq", "batch seq"))(model, rows, key=key)
    tokens, numbers = multihost_utils.process_allgather(found, tiled=True)
    last = numbers[0].max()
    shown = [(0, last // 4), (0, last // 2), *((row, last) for row in range(len(prompts)))]
    pairs = [(PROMPTS[row], describe_row(corpus, tokens[row], numbers[row], time)) for row, time in shown]
    return [
        (f"{name}, {time} of {last} steps: {prompt}", text)
        for (_, time), (prompt, text) in zip(shown, pairs, strict=True)
    ]


def describe_row(corpus, tokens, numbers, time):
    """Return what follows the prompt in a row after some steps, with a block for each token that is masked."""
    new = np.flatnonzero(numbers > 0)
    return "".join("█" if numbers[place] > time else corpus.decode(tokens[place : place + 1]) for place in new)


if __name__ == "__main__":
    train.run_cli(main, Config)
