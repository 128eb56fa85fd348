"""Compare a mixture of experts with a dense model of equal active parameters: 2.17 bits per byte against 2.28.

    python recipes/moe.py                                 # four runs on the same batches, 2 1/4 minutes on 2 cores
    python recipes/moe.py --experts 64 --top-k 8 --shared-mlp-dim 256 --router biased --embed 512 --layers 12 --expert 8

- dense: a Transformer whose feed-forward layers are as wide as all experts that a token uses;
- unbalanced: the mixture, trained on the cross-entropy alone;
- balance-loss: with an auxiliary load-balancing loss (Switch, arXiv:2101.03961): 2.17, mean of three seeds;
- loss-free: with a router bias, zero at first, that moves against the load, without gradient (arXiv:2408.15664).
"""

from functools import partial
from pathlib import Path
from typing import Literal, get_args

import equinox as eqx
import jax

import zoo
from zoo import tools, train

import optax

Variant = Literal["dense", "unbalanced", "balance-loss", "loss-free"]
RUNS: tuple[Variant, ...] = get_args(Variant)


def main(
    *,
    runs: tuple[Variant, ...] = RUNS,
    data: tuple[Path, ...] = (),
    vocab: int = 256,
    embed: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    mlp_dim: int = 64,
    experts: int = 8,
    top_k: int = 2,
    shared_mlp_dim: int = 0,
    router: Literal["softmax", "biased"] = "softmax",
    capacity_factor: float | None = None,
    balance_weight: float = 0.01,
    bias_rate: float = 1e-3,
    seq_len: int = 128,
    batch_size: int = 16,
    steps: int = 600,
    learning_rate: float = 6e-3,
    warmup_steps: int = 60,
    weight_decay: float = 0.1,
    eval_every: int = 60,
    mesh_options: train.MeshOptions = train.MeshOptions(),
    run_options: train.RunOptions = train.RunOptions(Path("runs/moe")),
) -> None:
    """Train each variant, compare.

    Args:
        runs: Variants to train.
        data: Files and directories of text; by default this Python's standard library.
        vocab: 256 for bytes; more trains a byte-pair encoding on the text.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads, embed / heads wide each.
        kv_heads: Heads of keys and values, for grouped-query attention; by default as many as heads.
        mlp_dim: Width of an expert. The dense model's MLP is top_k * mlp_dim + shared_mlp_dim wide.
        experts: Experts per layer.
        top_k: Experts per token.
        shared_mlp_dim: Width of a shared expert, which every token uses.
        router: Router scores: softmax, as in Mixtral; or DeepSeek-V3's sigmoid, whose router has a bias in every run.
        capacity_factor: Tokens per expert and sequence, as a multiple of an even load; the rest are dropped.
        balance_weight: Weight of the load-balancing loss, in its run.
        bias_rate: Step of the router bias, in the loss-free run.
        seq_len: Tokens per sequence.
        batch_size: Sequences per step, over all devices.
        steps: Optimizer steps of each run.
        learning_rate: Peak learning rate, after linear warmup; cosine decay to a tenth.
        warmup_steps: Steps of linear warmup, at most half of all.
        weight_decay: AdamW's, of matrices and embeddings.
        eval_every: Steps between evaluations, each with a checkpoint.
    """
    config, mesh, warmup_steps = dict(locals()), mesh_options.make_mesh(), min(warmup_steps, steps // 2)
    train.check_names("runs", runs, RUNS)
    if steps < 1 or min(balance_weight, bias_rate) < 0:
        raise ValueError(f"{steps=} are at least 1; {balance_weight=} and {bias_rate=} at least 0")
    corpus, key = train.load_text(data, vocab=vocab), jax.random.key(run_options.seed)

    def make(name, key):
        options = {"vocab": corpus.vocab, "embed": embed, "layers": layers, "heads": heads, "kv_heads": kv_heads}
        options |= {"qk_norm": True}
        if name == "dense":
            return mesh_options.apply(zoo.models.Transformer(**options, mlp=top_k * mlp_dim + shared_mlp_dim, key=key))
        biased = partial(zoo.layers.BiasedRouter, score="softmax" if router == "softmax" else "sigmoid")
        options["router"] = biased if name == "loss-free" or router == "biased" else zoo.layers.SoftmaxRouter
        options |= {"experts": experts, "top": top_k, "shared": shared_mlp_dim or None, "mlp": mlp_dim}
        return mesh_options.apply(zoo.models.MixtureOfExperts(**options, capacity_factor=capacity_factor, key=key))

    for name in runs:  # sizes that do not fit the mesh raise now, not after an hour
        mesh.specs(eqx.filter_eval_shape(make, name, key))
    schedule = jax.jit(optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10))
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = mesh_options.wrap_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw))

    def loss_fn(model, batch, weight=0.0):
        loss, routing = zoo.models.cross_entropy_and_routing(zoo.cast(model, mesh_options.dtype), batch, balance=weight)
        return loss, [zoo.models.tokens_per_expert(layer) for layer in routing]  # aux: summed over devices

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state, name):
        gradient = zoo.value_and_grad(loss_fn, mesh, has_aux=True, **mesh_options.accumulation)
        weight, scale = balance_weight if name == "balance-loss" else 0.0, train.loss_scale(opt_state)
        (loss, visits), grads = gradient(model, batch, weight, loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        rate, model = bias_rate if name == "loss-free" else 0.0, eqx.apply_updates(model, updates)
        model = zoo.models.update_expert_bias(model, visits, rate=rate) if rate else model
        return zoo.place(model, mesh), opt_state, loss, optax.tree.norm(grads), visits

    held_out, tokens, rows = corpus.validation.ordered(seq_len, batch_size, limit=8), batch_size * seq_len, []
    evaluate = train.Evaluation(loss_fn, mesh, has_aux=True, validation=held_out)
    for name in runs:
        model = zoo.init(partial(make, name), key, mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(seq_len, batch_size, seed=run_options.seed, process=zoo.parallel.reader(mesh))
        active = zoo.models.count_active_parameters(model)
        with train.Run(run_options.subrun(name), config=config | {"run": name}) as run:
            run.print_line(f"{name}: {zoo.count(model):,} parameters, {active:,} active; on {mesh}; {corpus}")
            model, opt_state = run.restore((model, opt_state), batches)
            for batch in run.steps(batches, steps, tokens=tokens, flops=6 * tokens * active):
                batch = zoo.place_batch(batch, mesh, vocab=corpus.vocab)
                model, opt_state, loss, norm, visits = step(batch, model, opt_state, name)
                run.log(
                    loss=loss, gradient_norm=norm, **train.count_skips(opt_state), learning_rate=schedule(run.step - 1)
                )
                if visits and run.every(max(steps // 100, 1)):
                    run.log(visits=jax.numpy.stack(visits))
                if run.every(eval_every):
                    bits, counts = evaluate(model)
                    loads = [(count / count.mean()).max() for count in counts]  # of the busiest expert per layer
                    run.log(**bits, **({"largest_load": max(loads)} if loads else {}))
                if run.due(eval_every):
                    run.save((model, opt_state), batches)
        if run.stopped:
            return
        last, row = train.summary(run.directory), {"run": name, "parameters": zoo.count(model), "active": active}
        row |= {"bits per byte": last["validation"], "largest load": last.get("largest_load", "none")}
        rows.append(row | {"tokens/s": round(last["tokens_per_second"])})
    tools.report_runs(
        run_options.out,
        "A mixture of experts and a dense model",
        rows,
        description=f"Held-out text after {steps * tokens:,} tokens on {mesh}",
        tokens_per_step=tokens,
        loads={"visits": "The load of each expert"},
        parameters=tools.report.tabulate_parameters(model, mesh),
        recipe=main,
    )


if __name__ == "__main__":
    train.run_cli(main)
