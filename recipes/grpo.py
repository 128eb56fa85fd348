"""Reinforcement learning from rewards: a model samples answers, and learns from how they compare (GRPO and its kin).

    python recipes/grpo.py                                # 150 steps: sorting the digits of a number
    python recipes/grpo.py --updates 4 --loss dapo --fill-groups 2
    python recipes/grpo.py --checkpoint Qwen/Qwen3-0.6B --data prompts.jsonl --prompt-len 256 --max-new-tokens 512 \\
        --learning-rate 1e-6                              # prompts with an `answer`: a number to find, or a text
    python recipes/grpo.py ... --reward rewards.py:exact rewards.py:brief=0.2 --lora 16

By default a two-layer Transformer first learns the format from answers of which 30% are sorted. Then rewards teach it:
the share of sampled answers that are sorted rises from 20% to 95%, in 150 steps and a minute on two cores.

One model samples and learns, on one mesh: there is no server, and without --beta no second model. The ratio of the
first update is exactly 1 in any dtype. What the sampler and the training program disagree about is logged as the gap.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import zoo
from zoo import tools, train
from zoo.text.tasks.digit_sorting import count_sorted_digits, list_sorting_examples, list_sorting_prompts
from zoo.text.tokenizers import ByteTokenizer
from zoo.train import objectives

CLIP = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28), "cispo": (1.0, 4.0)}  # others: (0.2, 0.2)
ADVANTAGES: dict[str, Any] = {"dr_grpo": {"scale": "none"}, "rloo": {"baseline": "others", "scale": "none"}}
START_STEPS = 250


@dataclass(frozen=True)
class Config:
    """Sample answers to prompts, reward them, learn; evaluate on held-out prompts, export."""

    checkpoint: Path | None = None  # Model to start from; by default a small one is trained first, on digits.
    # Prompts: JSON lines, Parquet, datasets on disk or of the hub, with `prompt` and what the rewards read.
    data: tuple[str, ...] = ()
    records: train.RecordOptions = train.RecordOptions(kind="prompts")
    # Reward functions, FILE.py:FUNCTION[=WEIGHT]; by default 1 for the record's `answer`.
    reward: tuple[str, ...] = ()
    lora: int = 0  # Rank of LoRA adapters; 0 trains all parameters.
    targets: tuple[str, ...] = ("all-linear",)  # Linear layers to adapt.
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"] = "grpo"  # Ratio, surrogate and average.
    clip: tuple[float, float] | None = None  # Ratios below 1 - LOW and above 1 + HIGH are clipped; default: the loss's.
    beta: float = 0.0  # Weight of the KL divergence from the start; 0 keeps no reference in memory.
    updates: int = 1  # Optimizer updates per batch of samples.
    truncate_ratio: float = 2.0  # A token weighs p / p of the sampler, at most this.
    samples: int = 8  # Answers per prompt: a group, whose rewards are compared.
    temperature: float = 1.0  # Of the samples, and of the policy that is trained.
    fill_groups: int = 0  # Further batches of prompts to draw, at most, while groups have equal rewards.
    prompt_len: int = 16  # Tokens of the longest prompt; longer ones are left out.
    max_new_tokens: int = 8  # Tokens of the longest answer.
    batch_size: int = 32  # Prompts per step, over all devices.
    steps: int = 150  # Batches of samples.
    learning_rate: float = 3e-4  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 5  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.0  # AdamW's, of matrices and embeddings.
    eval_prompts: int = 128  # Held-out prompts, answered greedily.
    eval_every: int = 50  # Steps between evaluations, each with a checkpoint.
    mesh: train.MeshOptions = train.MeshOptions()
    run: train.RunOptions = train.RunOptions(Path("runs/grpo"))


def train_start(config: Config, mesh) -> train.Run:
    """Train a small model on answers of which 30% are sorted, in a run of its own."""
    seed = config.run.seed
    examples = list_sorting_examples(20_000, seed=seed)
    data = train.load_records(examples, tokenizer=ByteTokenizer(), seq_len=44, validation=0)  # four texts in a row
    batches = data.train.batches(32, seed=seed, process=zoo.parallel.reader(mesh))
    make = partial(zoo.models.Transformer, vocab=data.vocab, embed=64, layers=2, heads=4, mlp=128)
    model = zoo.init(lambda key: make(key=key), jax.random.key(seed), mesh)
    optimizer = optax.adam(3e-3)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = zoo.value_and_grad(zoo.cross_entropy, mesh)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss

    with train.Run(config.run, config=config, name="start") as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, START_STEPS):
            model, opt_state, loss = step(zoo.place_batch(batch, mesh), model, opt_state)
            run.log(loss=loss)
            if run.due(START_STEPS):
                run.save((model, opt_state), batches)
    batches.close()
    run.export(model, data, seq_len=config.prompt_len + config.max_new_tokens)
    return run


def compute_loss(config: Config, log_probs, old, rollouts, weights):
    """Return total and count of the loss, and where it is clipped; `old` is log p before the updates of this batch."""
    log_ratio = log_probs - old
    low, high = config.clip or CLIP.get(config.loss, (0.2, 0.2))
    if config.loss in ("gspo", "rloo"):
        log_ratio = objectives.sequence_log_ratio(log_ratio, weights, normalized=config.loss == "gspo")
    if config.loss == "cispo":
        losses = objectives.cispo_loss(log_ratio, log_probs, rollouts.advantages, largest=1 + high)
        clipped = log_ratio > jnp.log1p(high)
    else:
        losses = objectives.policy_loss(log_ratio, rollouts.advantages, clip=(low, high))
        clipped = objectives.is_clipped(log_ratio, rollouts.advantages, clip=(low, high))
    losses *= objectives.truncate_ratio(old, rollouts.sampler, largest=config.truncate_ratio)
    if config.beta:  # weighted by the ratio, its gradient is the divergence's (DeepSeek-V3.2, arXiv:2512.02556)
        losses += config.beta * jnp.exp(log_probs - old) * objectives.kl_estimate(log_probs, rollouts.reference)
    if config.loss in ("dapo", "cispo"):
        return objectives.per_token(losses, weights), clipped
    if config.loss == "dr_grpo":
        return objectives.per_length(losses, weights, config.max_new_tokens), clipped
    return objectives.per_row(losses, weights), clipped


def main(config: Config) -> None:
    check(config)
    mesh = config.mesh.make_mesh()
    rows = config.batch_size * config.samples
    if rows % (shares := mesh.count_shards("batch") * config.mesh.microbatches):
        raise ValueError(f"--batch-size x --samples is {rows} rows, for {shares} devices or micro-batches: a multiple")
    key = jax.random.key(config.run.seed)
    if config.checkpoint is None:
        start = train_start(config, mesh)
        if start.stopped:
            return
        checkpoint = start.directory / "export"
    else:
        checkpoint = zoo.weights.resolve_directory(config.checkpoint)

    tokenizer = train.read_tokenizer(checkpoint)
    source = config.data or list_sorting_prompts()
    template = config.records.read_template(checkpoint, tokenizer) if config.data else None
    reading = {"tokenizer": tokenizer, "template": template, "seq_len": config.prompt_len}
    data = config.records.load(source, kinds=("prompts",), **reading)
    rewards = train.Rewards({"exact": train.match_answer})
    if config.reward:
        rewards = train.Rewards.read(config.reward)
    elif not config.data:
        rewards = train.Rewards({"digits": count_sorted_digits, "exact": train.match_answer})
    batches = data.train.batches(config.batch_size, seed=config.run.seed, process=(0, 1))  # each process samples all
    sampler = train.GroupSampler(
        data,
        rewards,
        mesh=mesh,
        dtype=config.mesh.dtype,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
    )
    reader = zoo.parallel.reader(mesh)
    seq_len = config.prompt_len + config.max_new_tokens
    evaluate = partial(sampler.evaluate, limit=config.eval_prompts, batch_size=rows)

    dtype = config.mesh.dtype if config.lora else "float32"  # of a frozen base the compute dtype
    base = config.mesh.apply(zoo.load(checkpoint, mesh=mesh, dtype=dtype))
    model = base
    if config.lora:
        model = zoo.adapters.lora(base, targets=config.targets, rank=config.lora, alpha=2 * config.lora, key=key)
        model = zoo.place(model, mesh)
    reference = None
    if config.beta and not config.lora:
        reference = jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, base)

    peak = config.learning_rate
    updates = config.steps * config.updates
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, min(config.warmup_steps, updates // 2), updates, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def log_probs_of(model, batch):
        return zoo.log_probs(zoo.cast(model, config.mesh.dtype), batch, temperature=config.temperature)

    def reference_log_probs_of(model, batch):
        return log_probs_of(zoo.adapters.remove(model) if config.lora else model, batch)

    def loss_fn(model, batch, rollouts):
        model = zoo.cast(model, config.mesh.dtype)
        log_probs, entropy = zoo.log_probs(model, batch, temperature=config.temperature, entropy=True)
        # In the first update the ratio is exactly 1, whatever the dtype, and its gradient is right.
        old = jax.lax.stop_gradient(log_probs) if rollouts.log_probs is None else rollouts.log_probs
        weights = batch["weights"]
        loss, clipped = compute_loss(config, log_probs, old, rollouts, weights)
        gap = jnp.abs(old - rollouts.sampler) * weights
        sums = {"entropy": entropy.sum(), "clipped": (clipped * weights).sum(), "sampler_gap": gap.sum()}
        return loss, (sums, weights.sum(), rollouts.find_largest(gap, rows))

    gradient = zoo.value_and_grad(loss_fn, mesh, has_aux=True, **config.mesh.accumulation)
    forward = zoo.spmd(log_probs_of, mesh, out="batch seq")
    forward_reference = zoo.spmd(reference_log_probs_of, mesh, out="batch seq")

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        (loss, (sums, count, largest)), grads = gradient(model, *inputs)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        metrics = {name: x / count for name, x in sums.items()}
        metrics |= {"loss": loss, "largest_gap": largest.max(), "gradient_norm": optax.tree.norm(grads)}
        return model, opt_state, metrics

    # `validation` is a reward.
    with train.Run(config.run, config=config, best="highest", frozen=model if config.lora else None) as run:
        run.print_line(f"{zoo.count(model):,} trained parameters of {checkpoint} on {mesh}\n{data}")
        before, samples = evaluate(model)
        trainable, opt_state = run.restore((zoo.trainable(model), opt_state), batches)
        model = eqx.combine(trainable, model)
        for prompts in run.steps(batches, config.steps, tokens=rows * seq_len):
            sample_key = jax.random.fold_in(key, run.step)
            more = islice(batches, config.fill_groups)
            groups = sampler.sample(model, prompts, samples=config.samples, key=sample_key, more=more)
            advantages = objectives.group_advantages(groups.rewards, **ADVANTAGES.get(config.loss, {}))
            packed = train.pack_rollouts(groups.prompts, groups.samples, advantages, seq_len, process=reader)
            batch, rollouts = zoo.place_batch(packed, mesh)
            if config.beta:
                frozen = model if config.lora else reference
                rollouts = replace(rollouts, reference=forward_reference(frozen, batch))
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
    parameters = zoo.trainable(model)
    if config.lora:
        zoo.adapters.save(model, run.directory / "adapter", base=config.checkpoint or checkpoint)
        data.save(run.directory / "adapter")
        model = zoo.adapters.merge(model)
    _, after = evaluate(model)
    tools.report_run(
        run,
        "Reinforcement learning from rewards",
        model,
        mesh,
        data,
        config=config,
        before=before,
        samples=[*samples[-3:], *after[-3:]],
        export_seq_len=seq_len,
        parameters=parameters,
    )


def check(config: Config) -> None:
    """Refuse values that cannot be trained, before anything is computed."""
    if config.data and config.checkpoint is None:
        raise ValueError("--data is for a model that reads it: add --checkpoint DIR, or a name on the hub")
    if config.mesh.pipe > 1:
        raise ValueError(f"--pipe {config.mesh.pipe}: the stages of a pipeline do not sample; --fsdp shards layers too")
    counts = {"samples": 2, "updates": 1, "prompt_len": 1, "max_new_tokens": 1, "eval_prompts": 1}
    for name, least in {**counts, "fill_groups": 0, "beta": 0}.items():
        if getattr(config, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: at least {least} was expected")
    for name in ("temperature", "truncate_ratio"):
        if not getattr(config, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: a number above 0 was expected")


if __name__ == "__main__":
    train.run_cli(main, Config)
