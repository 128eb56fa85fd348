"""Compare a mixture of experts with a dense model of equal active parameters: 2.17 bits per byte against 2.28.

    python recipes/moe.py                                 # four runs on the same batches, 2 1/4 minutes on 2 cores
    python recipes/moe.py --experts 64 --top-k 8 --embed 512 --layers 12 --expert 8

- dense: a Transformer whose feed-forward layers are as wide as all experts that a token uses;
- unbalanced: the mixture, trained only on the cross-entropy;
- balance-loss: with an auxiliary load-balancing loss (Switch, arXiv:2101.03961): 2.17, mean of three seeds;
- loss-free: with a router bias, zero at first, that moves against the load, without gradient (arXiv:2408.15664).

DeepSeek-V3's mixture: in `make_model` a router `partial(zoo.layers.BiasedRouter, score="sigmoid")`, and `shared=256`.
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
class Config(train.ModelConfig):  # batch_size, steps, learning_rate, ..., mesh, data, seq_len, vocab, embed, ...
    """Train each variant, compare."""

    runs: tuple[Variant, ...] = RUNS  # Variants to train.
    mlp_dim: int = 64  # Width of an expert. The dense model's MLP is top_k * mlp_dim wide.
    experts: int = 8  # Experts per layer.
    top_k: int = 2  # Experts per token.
    balance_weight: float = 0.01  # Weight of the load-balancing loss, in its run.
    bias_rate: float = 1e-3  # Step of the router bias, in the loss-free run.
    steps: int = 600
    learning_rate: float = 6e-3
    warmup_steps: int = 60
    eval_every: int = 60
    run: train.RunOptions = train.RunOptions(Path("runs/moe"))


def make_model(config, name, vocab, key):
    sizes = {"vocab": vocab, "embed": config.embed, "layers": config.layers, "heads": config.heads, "qk_norm": True}
    if name == "dense":
        return config.mesh.apply(zoo.models.Transformer(**sizes, mlp=config.top_k * config.mlp_dim, key=key))
    router = zoo.layers.SoftmaxRouter
    if name == "loss-free":
        router = partial(zoo.layers.BiasedRouter, score="softmax")
    mixture = {"mlp": config.mlp_dim, "experts": config.experts, "top": config.top_k, "router": router}
    return config.mesh.apply(zoo.models.MixtureOfExperts(**sizes, **mixture, key=key))


def main(config: Config) -> None:
    train.check_names("runs", config.runs, RUNS)
    mesh = config.mesh.make_mesh()
    key = jax.random.key(config.run.seed)
    corpus = train.load_text(config.data, vocab=config.vocab)
    held_out = corpus.validation.ordered(config.seq_len, config.batch_size, limit=8)
    for name in config.runs:  # sizes that do not fit the mesh raise now, not after an hour
        mesh.specs(eqx.filter_eval_shape(make_model, config, name, corpus.vocab, key))

    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss_fn(model, batch, balance=0.0):
        model = zoo.cast(model, config.mesh.dtype)
        loss, routing = zoo.models.cross_entropy_and_routing(model, batch, balance=balance)
        return loss, [zoo.models.tokens_per_expert(layer) for layer in routing]  # aux: summed over devices

    gradient = zoo.value_and_grad(loss_fn, mesh, has_aux=True, **config.mesh.accumulation)
    evaluate = train.Evaluation(loss_fn, mesh, has_aux=True, validation=held_out)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state, name):
        balance = config.balance_weight if name == "balance-loss" else 0.0
        (loss, visits), grads = gradient(model, batch, balance)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = eqx.apply_updates(model, updates)
        if name == "loss-free":
            model = zoo.models.update_expert_bias(model, visits, rate=config.bias_rate)
        return zoo.place(model, mesh), opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}, visits

    rows = []
    for name in config.runs:
        model = zoo.init(partial(make_model, config, name, corpus.vocab), key, mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(config.seq_len, config.batch_size, seed=config.run.seed, mesh=mesh)

        with train.Run(config, name=name, mesh=mesh, data=corpus, model=model) as run:
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, config.steps):
                model, opt_state, metrics, visits = step(batch, model, opt_state, name)
                run.log(**metrics, learning_rate=schedule(run.step - 1))
                if visits and run.every(max(config.steps // 100, 1)):
                    run.log(visits=jnp.stack(visits))
                if run.every(config.eval_every):
                    run.log(**add_largest_load(*evaluate(model)))
                if run.due(config.eval_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return

        rows.append(tabulate(name, model, train.summary(run.directory)))

    tools.report_runs(
        config,
        "A mixture of experts and a dense model",
        rows,
        description=f"Held-out text after {config.steps} steps on {mesh}",
        tokens_per_step=config.batch_size * config.seq_len,
        loads={"visits": "The largest load of an expert"},
        parameters=tools.report.tabulate_parameters(model, mesh),
    )


def tabulate(name, model, last):
    return {
        "run": name,
        "parameters": zoo.count(model),
        "active": zoo.models.count_active_parameters(model),
        "bits per byte": last["validation"],
        "largest load": last.get("largest_load", "none"),
        "tokens/s": round(last["tokens_per_second"]),
    }


def add_largest_load(bits, counts):
    """Add the load of the busiest expert of all layers, against an even load, unless the model is dense."""
    if not counts:
        return bits
    return {**bits, "largest_load": max((count / count.mean()).max() for count in counts)}


if __name__ == "__main__":
    train.run_cli(main, Config)
