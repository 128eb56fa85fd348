"""Compare a mixture of experts with a dense model of equal active parameters: 2.17 bits per byte against 2.28.

    python recipes/moe.py                                 # four runs on the same batches, 2 1/4 minutes on 2 cores
    python recipes/moe.py --experts 64 --top-k 8 --shared-mlp-dim 256 --router biased --embed 512 --layers 12 --expert 8

- dense: a Transformer whose feed-forward layers are as wide as all experts that a token uses;
- unbalanced: the mixture, trained only on the cross-entropy;
- balance-loss: with an auxiliary load-balancing loss (Switch, arXiv:2101.03961): 2.17, mean of three seeds;
- loss-free: with a router bias, zero at first, that moves against the load, without gradient (arXiv:2408.15664).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import zoo
from zoo import tools, train

Variant = Literal["dense", "unbalanced", "balance-loss", "loss-free"]
RUNS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class Config:
    """Train each variant, compare."""

    runs: tuple[Variant, ...] = RUNS  # Variants to train.
    data: tuple[Path, ...] = ()  # Files and directories of text; by default this Python's standard library.
    vocab: int = 256  # 256 for bytes; more trains a byte-pair encoding on the text.
    embed: int = 64  # Width of the residual stream.
    layers: int = 2  # Number of blocks.
    heads: int = 2  # Attention heads, embed / heads wide each.
    kv_heads: int | None = None  # Heads of keys and values, for grouped-query attention; by default as many as heads.
    mlp_dim: int = 64  # Width of an expert. The dense model's MLP is top_k * mlp_dim + shared_mlp_dim wide.
    experts: int = 8  # Experts per layer.
    top_k: int = 2  # Experts per token.
    shared_mlp_dim: int = 0  # Width of a shared expert, which every token uses.
    # Router scores: softmax, as in Mixtral; or DeepSeek-V3's sigmoid, whose router has a bias in every run.
    router: Literal["softmax", "biased"] = "softmax"
    # Tokens per expert and sequence, as a multiple of an even load; the rest are dropped.
    capacity_factor: float | None = None
    balance_weight: float = 0.01  # Weight of the load-balancing loss, in its run.
    bias_rate: float = 1e-3  # Step of the router bias, in the loss-free run.
    seq_len: int = 128  # Tokens per sequence.
    batch_size: int = 16  # Sequences per step, over all devices.
    steps: int = 600  # Optimizer steps of each run.
    learning_rate: float = 6e-3  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 60  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.1  # AdamW's, of matrices and embeddings.
    eval_every: int = 60  # Steps between evaluations, each with a checkpoint.
    mesh: train.MeshOptions = train.MeshOptions()
    run: train.RunOptions = train.RunOptions(Path("runs/moe"))


def main(config: Config) -> None:
    check(config)
    mesh = config.mesh.make_mesh()
    key = jax.random.key(config.run.seed)

    corpus = train.load_text(config.data, vocab=config.vocab)
    reader = zoo.parallel.reader(mesh)
    validation = corpus.validation.ordered(config.seq_len, config.batch_size, limit=8)

    def make_model(name, key):
        sizes = {
            "vocab": corpus.vocab,
            "embed": config.embed,
            "layers": config.layers,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "qk_norm": True,
        }
        if name == "dense":
            active_dim = config.top_k * config.mlp_dim + config.shared_mlp_dim
            model = zoo.models.Transformer(**sizes, mlp=active_dim, key=key)
        else:
            model = zoo.models.MixtureOfExperts(
                **sizes,
                mlp=config.mlp_dim,
                experts=config.experts,
                top=config.top_k,
                shared=config.shared_mlp_dim or None,
                router=choose_router(name, config.router),
                capacity_factor=config.capacity_factor,
                key=key,
            )
        return config.mesh.apply(model)

    for name in config.runs:  # sizes that do not fit the mesh raise now, not after an hour
        mesh.specs(eqx.filter_eval_shape(make_model, name, key))

    peak = config.learning_rate
    warmup = min(config.warmup_steps, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss_fn(model, batch, balance=0.0):
        model = zoo.cast(model, config.mesh.dtype)
        loss, routing = zoo.models.cross_entropy_and_routing(model, batch, balance=balance)
        return loss, [zoo.models.tokens_per_expert(layer) for layer in routing]  # aux: summed over devices

    gradient = zoo.value_and_grad(loss_fn, mesh, has_aux=True, **config.mesh.accumulation)
    evaluate = train.Evaluation(loss_fn, mesh, has_aux=True, validation=validation)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state, name):
        balance = config.balance_weight if name == "balance-loss" else 0.0
        (loss, visits), grads = gradient(model, batch, balance)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = eqx.apply_updates(model, updates)
        if name == "loss-free" and config.bias_rate > 0:
            model = zoo.models.update_expert_bias(model, visits, rate=config.bias_rate)
        model = zoo.place(model, mesh)
        return model, opt_state, loss, optax.tree.norm(grads), visits

    tokens = config.batch_size * config.seq_len
    rows = []
    for name in config.runs:
        model = zoo.init(partial(make_model, name), key, mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, process=reader)
        active = zoo.models.count_active_parameters(model)

        with train.Run(config.run, config=config, name=name) as run:
            run.print_line(f"{name}: {zoo.count(model):,} parameters, {active:,} active; on {mesh}; {corpus}")
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, config.steps, tokens=tokens, flops=6 * tokens * active):
                batch = zoo.place_batch(batch, mesh, vocab=corpus.vocab)
                model, opt_state, loss, norm, visits = step(batch, model, opt_state, name)
                run.log(loss=loss, gradient_norm=norm, learning_rate=schedule(run.step - 1))
                if visits and run.every(max(config.steps // 100, 1)):
                    run.log(visits=jnp.stack(visits))
                if run.every(config.eval_every):
                    bits, counts = evaluate(model)
                    run.log(**bits)
                    if counts:
                        # The busiest expert of all layers, against an even load.
                        run.log(largest_load=max((count / count.mean()).max() for count in counts))
                if run.due(config.eval_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return

        last = train.summary(run.directory)
        row = {
            "run": name,
            "parameters": zoo.count(model),
            "active": active,
            "bits per byte": last["validation"],
            "largest load": last.get("largest_load", "none"),
            "tokens/s": round(last["tokens_per_second"]),
        }
        rows.append(row)

    tools.report_runs(
        config.run.out,
        "A mixture of experts and a dense model",
        rows,
        config=config,
        description=f"Held-out text after {config.steps * tokens:,} tokens on {mesh}",
        tokens_per_step=tokens,
        loads={"visits": "The largest load of an expert"},
        parameters=tools.report.tabulate_parameters(model, mesh),
    )


def check(config: Config) -> None:
    """Refuse values that cannot be trained, before text is read."""
    train.check_names("runs", config.runs, RUNS)
    if config.steps < 1:
        raise ValueError(f"steps={config.steps} are at least 1")
    if min(config.balance_weight, config.bias_rate) < 0:
        raise ValueError(f"balance_weight={config.balance_weight} and bias_rate={config.bias_rate} are at least 0")


def choose_router(name, router):
    """Return the class of a run's router: with a bias in the loss-free run, and in each with DeepSeek-V3's sigmoid."""
    if router == "biased":
        return partial(zoo.layers.BiasedRouter, score="sigmoid")
    if name == "loss-free":
        return partial(zoo.layers.BiasedRouter, score="softmax")
    return zoo.layers.SoftmaxRouter


if __name__ == "__main__":
    train.run_cli(main, Config)
