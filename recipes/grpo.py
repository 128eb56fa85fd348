"""Reinforcement learning from rewards: a model samples answers, and learns from how they compare (GRPO).

    python recipes/grpo.py                                # 150 steps: sorting the digits of a number
    python recipes/grpo.py --updates 4
    python recipes/grpo.py --checkpoint Qwen/Qwen3-0.6B --data prompts.jsonl --prompt-len 256 --max-new-tokens 512 \\
        --learning-rate 1e-6                              # prompts with an `answer`: a number to find, or a text
    python recipes/grpo.py ... --reward rewards.py:exact rewards.py:brief=0.2 --lora 16

By default a two-layer Transformer first learns the format from answers of which 30% are sorted. Then rewards teach it:
the share of sampled answers that are sorted rises from 20% to 95%, in 150 steps and a minute on two cores.

One model samples and learns, on one mesh: there is no server and no second model. The ratio of the first update is
exactly 1 in any dtype. What the sampler and the training program disagree about is logged as the gap. GRPO is
arXiv:2402.03300; for Dr. GRPO, DAPO, GSPO, CISPO, RLOO or a KL term replace `compute_loss`: docs/reinforcement.md.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import zoo
from zoo import tools, train
from zoo.text.tasks.digit_sorting import count_sorted_digits, list_sorting_examples, list_sorting_prompts
from zoo.text.tokenizers import ByteTokenizer
from zoo.train import objectives

CLIP = (0.2, 0.2)  # ratios below 0.8 and above 1.2 are clipped
START_STEPS = 250


@dataclass(frozen=True)
class Config(train.TrainConfig):  # batch_size, steps, learning_rate, ..., mesh
    """Sample answers to prompts, reward them, learn; evaluate on held-out prompts, export."""

    checkpoint: Path | None = None  # Model to start from; by default a small one is trained first, on digits.
    # Prompts: JSON lines, Parquet, datasets on disk or of the hub, with `prompt` and what the rewards read.
    data: tuple[str, ...] = ()
    records: train.RecordOptions = train.RecordOptions(kind="prompts")
    # Reward functions, FILE.py:FUNCTION[=WEIGHT]; by default 1 for the record's `answer`.
    reward: tuple[str, ...] = ()
    lora: int = 0  # Rank of LoRA adapters; 0 trains all parameters.
    targets: tuple[str, ...] = ("all-linear",)  # Linear layers to adapt.
    updates: int = 1  # Optimizer updates per batch of samples.
    samples: int = 8  # Answers per prompt: a group, whose rewards are compared.
    temperature: float = 1.0  # Of the samples, and of the policy that is trained.
    prompt_len: int = 16  # Tokens of the longest prompt; longer ones are left out.
    max_new_tokens: int = 8  # Tokens of the longest answer.
    eval_prompts: int = 128  # Held-out prompts, answered greedily.
    batch_size: int = 32
    """Prompts per step, over all devices."""
    steps: int = 150
    """Batches of samples."""
    learning_rate: float = 3e-4
    warmup_steps: int = 5
    weight_decay: float = 0.0
    eval_every: int = 50
    run: train.RunOptions = train.RunOptions(Path("runs/grpo"))


def train_start(config, mesh):
    """Train a small model on answers of which 30% are sorted, in a run of its own; return its export, or None."""
    seed = config.run.seed
    examples = list_sorting_examples(20_000, seed=seed)
    data = train.load_records(examples, tokenizer=ByteTokenizer(), seq_len=44, validation=0)  # four texts in a row
    batches = data.train.batches(32, seed=seed, mesh=mesh)
    make = partial(zoo.models.Transformer, vocab=data.vocab, embed=64, layers=2, heads=4, mlp=128)
    model = zoo.init(lambda key: make(key=key), jax.random.key(seed), mesh)
    optimizer = optax.adam(3e-3)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = zoo.value_and_grad(zoo.cross_entropy, mesh)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss

    with train.Run(config, name="start", mesh=mesh, data=data, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, START_STEPS):
            model, opt_state, loss = step(batch, model, opt_state)
            run.log(loss=loss)
            if run.due(START_STEPS):
                run.save((model, opt_state), batches)
    batches.close()
    run.export(model, seq_len=config.prompt_len + config.max_new_tokens)
    return None if run.stopped else run.directory / "export"


def load_prompts(config, checkpoint):
    """Return records of prompts, and the rewards of answers to them."""
    tokenizer = train.read_tokenizer(checkpoint)
    template = config.records.read_template(checkpoint, tokenizer) if config.data else None
    reading = {"tokenizer": tokenizer, "template": template, "seq_len": config.prompt_len}
    data = config.records.load(config.data or list_sorting_prompts(), kinds=("prompts",), **reading)
    if config.reward:
        return data, train.Rewards.read(config.reward)
    if config.data:
        return data, train.Rewards({"exact": train.match_answer})
    return data, train.Rewards({"digits": count_sorted_digits, "exact": train.match_answer})


def load_model(config, checkpoint, mesh, key):
    if not config.lora:
        return config.mesh.apply(zoo.load(checkpoint, mesh=mesh, dtype="float32"))
    base = config.mesh.apply(zoo.load(checkpoint, mesh=mesh, dtype=config.mesh.dtype))
    options = {"targets": config.targets, "rank": config.lora, "alpha": 2 * config.lora}
    return zoo.place(zoo.adapters.lora(base, **options, key=key), mesh)


def compute_loss(log_probs, old, rollouts, weights):
    """Return total and count of the loss, and where it is clipped; `old` is log p before the updates of this batch."""
    log_ratio = log_probs - old
    losses = objectives.policy_loss(log_ratio, rollouts.advantages, clip=CLIP)
    losses *= objectives.truncate_ratio(old, rollouts.sampler)  # a token weighs p / p of the sampler, at most 2
    return objectives.per_row(losses, weights), objectives.is_clipped(log_ratio, rollouts.advantages, clip=CLIP)


def make_step(config, mesh, optimizer):
    """Return a step of the optimizer on rows of sampled answers."""

    def loss_fn(model, batch, rollouts):
        model = zoo.cast(model, config.mesh.dtype)
        log_probs, entropy = zoo.log_probs(model, batch, temperature=config.temperature, entropy=True)
        # In the first update the ratio is exactly 1, whatever the dtype, and its gradient is right.
        old = jax.lax.stop_gradient(log_probs) if rollouts.log_probs is None else rollouts.log_probs
        weights = batch["weights"]
        loss, clipped = compute_loss(log_probs, old, rollouts, weights)
        gap = jnp.abs(old - rollouts.sampler) * weights
        sums = {"entropy": entropy.sum(), "clipped": (clipped * weights).sum(), "sampler_gap": gap.sum()}
        return loss, (sums, weights.sum(), rollouts.find_largest(gap, config.batch_size * config.samples))

    gradient = zoo.value_and_grad(loss_fn, mesh, has_aux=True, **config.mesh.accumulation)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        (loss, (sums, count, largest)), grads = gradient(model, *inputs)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        metrics = {name: x / count for name, x in sums.items()}
        metrics |= {"loss": loss, "largest_gap": largest.max(), "gradient_norm": optax.tree.norm(grads)}
        return model, opt_state, metrics

    return step


def main(config: Config) -> None:
    mesh = config.mesh.make_mesh()
    check(config, mesh)
    rows = config.batch_size * config.samples
    key = jax.random.key(config.run.seed)
    start = config.checkpoint or train_start(config, mesh)
    if start is None:  # stopped
        return
    checkpoint = zoo.weights.resolve_directory(start)
    data, rewards = load_prompts(config, checkpoint)
    batches = data.train.batches(config.batch_size, seed=config.run.seed, process=(0, 1))  # each process samples all
    sampler = train.GroupSampler(
        data,
        rewards,
        mesh=mesh,
        dtype=config.mesh.dtype,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
    )
    evaluate = partial(sampler.evaluate, limit=config.eval_prompts, batch_size=rows)
    seq_len = config.prompt_len + config.max_new_tokens

    model = load_model(config, checkpoint, mesh, key)
    frozen = model if config.lora else None
    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps * config.updates)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
    step = make_step(config, mesh, optimizer)

    @partial(zoo.spmd, mesh=mesh, out="batch seq")
    def forward(model, batch):
        return zoo.log_probs(zoo.cast(model, config.mesh.dtype), batch, temperature=config.temperature)

    with train.Run(config, mesh=mesh, data=data, model=model, best="highest", frozen=frozen) as run:  # by reward
        before, samples = evaluate(model)
        trainable, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
        model = eqx.combine(trainable, model)
        for prompts in run.steps(batches, config.steps, placed=False, tokens=rows * seq_len):
            groups = sampler.sample(model, prompts, samples=config.samples, key=jax.random.fold_in(key, run.step))
            advantages = objectives.group_advantages(groups.rewards)
            packed = train.pack_rollouts(
                groups.prompts, groups.samples, advantages, seq_len, process=zoo.parallel.reader(mesh)
            )
            batch, rollouts = zoo.place_batch(packed, mesh)
            old = forward(model, batch) if config.updates > 1 else None
            for update in range(config.updates):
                inputs = batch, replace(rollouts, log_probs=old if update else None)
                model, opt_state, metrics = step(inputs, model, opt_state)
            run.log(**groups.metrics, **metrics, learning_rate=schedule(run.step * config.updates - 1))
            if run.every(config.eval_every):
                run.log(**evaluate(model)[0])
            if run.due(config.eval_every):
                run.save((zoo.trainable(model), opt_state), batches)
    if run.stopped:
        return

    merged = run.export_adapters(model, base=start)
    tools.report_run(
        run,
        "Reinforcement learning from rewards",
        merged,
        before=before,
        samples=[*samples[-3:], *evaluate(merged)[1][-3:]],
        export_seq_len=seq_len,
        parameters=zoo.trainable(model),
    )


def check(config: Config, mesh) -> None:
    """Refuse values that cannot be trained, before anything is computed."""
    if config.data and config.checkpoint is None:
        raise ValueError("--data is for a model that reads it: add --checkpoint DIR, or a name on the hub")
    if config.mesh.pipe > 1:
        raise ValueError(f"--pipe {config.mesh.pipe}: the stages of a pipeline do not sample; --fsdp shards layers too")
    rows = config.batch_size * config.samples
    if rows % (shares := mesh.count_shards("batch") * config.mesh.microbatches):
        raise ValueError(f"--batch-size x --samples is {rows} rows, for {shares} devices or micro-batches: a multiple")
    counts = {"samples": 2, "updates": 1, "prompt_len": 1, "max_new_tokens": 1, "eval_prompts": 1}
    for name, least in counts.items():
        if getattr(config, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: expected at least {least}")
    if not config.temperature > 0:
        raise ValueError(f"--temperature {config.temperature}: expected a number above 0")


if __name__ == "__main__":
    train.run_cli(main, Config)
