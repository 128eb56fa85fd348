"""Set a mixture of experts beside a dense model of equal active parameters: 2.17 bits per byte against 2.28.

    python recipes/moe.py                                 # four runs, one after another, on two cores
    python recipes/moe.py --resume                        # after Ctrl-C; on another mesh too
    python recipes/moe.py --experts 64 --top-k 8 --shared-mlp-dim 256 --router biased --embed 512 --layers 12 --fsdp 8

All runs see the same batches of Python's standard library in the same order:

- dense: a Transformer whose feed-forward layers are as wide as all that a token meets in a mixture;
- unbalanced: the mixture, trained for the text alone;
- balance-loss: with a loss on uneven experts (Switch, arXiv:2101.03961);
- loss-free: with a bias that moves against the load, and no gradient (arXiv:2408.15664).

Each has a folder with metrics and checkpoints in the folder of all, which at the end gets report.html: loss against
tokens, the load of every expert over time, and a table. docs/moe.md has the figures of three seeds; one takes two and
a quarter minutes on two cores. The figures above are the means, with the balance loss and dense.
"""

from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo import train  # isort: skip  (before optax: it says which command installs what is missing)
import optax

import zoo
from zoo.layers import BiasedRouter, SoftmaxRouter

Name = Literal["dense", "unbalanced", "balance-loss", "loss-free"]


class Variant(NamedTuple):
    """What tells one run from another."""

    mixture: bool = True
    balance: bool = False
    loss_free: bool = False


RUNS: dict[Name, Variant] = {
    "dense": Variant(mixture=False),
    "unbalanced": Variant(),
    "balance-loss": Variant(balance=True),
    "loss-free": Variant(loss_free=True),
}
ROUTERS = {  # the second of each has a bias that can move, and gives the same weights where it has not moved
    "softmax": (SoftmaxRouter, partial(BiasedRouter, score="softmax")),
    "biased": (BiasedRouter, BiasedRouter),
}


def main(
    *,
    runs: tuple[Name, ...] = tuple(RUNS),
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
    microbatches: int = 1,
    steps: int = 600,
    learning_rate: float = 6e-3,
    warmup_steps: int = 60,
    weight_decay: float = 0.1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    remat: zoo.parallel.Remat = "elementwise",
    fsdp: int = 1,
    tensor: int = 1,
    eval_every: int = 60,
    seed: int = 0,
    out: Path = Path("runs/moe"),
    resume: bool = False,
    profile: bool = False,
) -> None:
    """Train one after another, compare.

    Args:
        runs: Which of the runs.
        data: Files and folders of text; this Python's standard library where there are none.
        vocab: 256 for bytes; more for byte pairs, learnt from the text on the spot.
        embed: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads, embed / heads wide each.
        kv_heads: Heads of keys and values, shared by several queries each; as many as heads unless given.
        mlp_dim: Width of an expert. The dense model's is top * mlp + shared.
        experts: Experts in a layer.
        top_k: Experts that a token goes to.
        shared_mlp_dim: Width of one more expert, which every token goes to.
        router: What scores are: softmax, as in Mixtral; or the sigmoid of DeepSeek-V3, whose router has a bias in every
            run and moves it in one.
        capacity_factor: Visits that an expert takes of a row, as a multiple of an even share; the rest are dropped.
            None are unless given.
        balance_weight: How much of the loss on uneven experts is added, in the run that has it.
        bias_rate: By how much a step moves the bias, in the run that moves it.
        seq_len: Tokens in a row.
        batch_size: Rows in a step, on all devices together.
        microbatches: Parts in which a device takes its rows, one after another, to save memory.
        steps: Optimizer steps of each run.
        learning_rate: Peak of the learning rate, after warm-up; it falls to a tenth as a cosine does.
        warmup_steps: Steps of warm-up.
        weight_decay: Of matrices and embeddings, as in AdamW.
        dtype: What models compute in; parameters and their updates are float32, and so are routers.
        remat: What the backward pass computes again to save memory.
        fsdp: Devices that share each copy of the parameters.
        tensor: Devices that share each head, expert and vocabulary. All that remain split the batch.
        eval_every: Steps between validations, each with a checkpoint.
        seed: Of parameters and the order of the text.
        out: The folder of all runs.
        resume: Go on from the newest checkpoint in `out`.
        profile: Trace a few steps of each run into the folder `profile` of its own.
    """
    config = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    if not runs or set(runs) - RUNS.keys():
        raise ValueError(f"name one or more of the runs {', '.join(RUNS)}, not {', '.join(runs) or 'none'}")
    if router not in ROUTERS:
        raise ValueError(f"there is no router {router!r}, but {', '.join(ROUTERS)}")
    if steps < 1 or min(balance_weight, bias_rate) < 0:
        raise ValueError(f"steps={steps} are at least 1; balance={balance_weight} and bias_rate={bias_rate} at least 0")
    mesh = zoo.make_mesh(fsdp=fsdp, tensor=tensor)
    corpus = train.load_text(data, vocab=vocab)
    held_out = corpus.validation.ordered(seq_len, batch_size, limit=8)
    placed = [zoo.place_batch(rows, mesh) for rows in held_out]

    def make(variant, key):
        sizes = {"vocab": corpus.vocab, "embed": embed, "layers": layers, "heads": heads, "kv_heads": kv_heads}
        options = {"qk_norm": True, "remat": remat, "key": key}
        if not variant.mixture:
            return zoo.models.Transformer(**sizes, mlp=top_k * mlp_dim + shared_mlp_dim, **options)
        sizes |= {"mlp": mlp_dim, "experts": experts, "top": top_k, "shared": shared_mlp_dim or None}
        options |= {"router": ROUTERS[router][variant.loss_free], "capacity_factor": capacity_factor}
        return zoo.models.MixtureOfExperts(**sizes, **options)

    # Made in shapes alone at first: what cannot be made, or laid out, says so now and not after an hour.
    key = jax.random.key(seed)
    shapes = {name: eqx.filter_eval_shape(make, RUNS[name], key) for name in runs}
    layouts = {name: train.tabulate_parameters(model, mesh) for name, model in shapes.items()}

    warmup_steps = min(warmup_steps, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def loss_fn(model, batch, balance=0.0):
        model = zoo.cast(model, dtype)
        loss, routing = zoo.models.cross_entropy_and_routing(model, batch, balance=balance)
        return loss, [zoo.models.tokens_per_expert(one) for one in routing]  # of a device; summed over all of them

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state, variant):
        gradient = zoo.value_and_grad(loss_fn, mesh, has_aux=True, microbatches=microbatches)
        (loss, visits), grads = gradient(model, batch, balance_weight if variant.balance else 0.0)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = eqx.apply_updates(model, updates)
        if variant.loss_free:
            model = zoo.models.update_expert_bias(model, visits, rate=bias_rate)
        return zoo.place(model, mesh), opt_state, loss, visits

    def validate(model):
        """Bits per byte on held-out text, and the largest load of an expert as a multiple of its layer's mean."""
        found = jax.device_get([zoo.value(loss_fn, mesh, has_aux=True)(model, rows) for rows in placed])
        mean = np.average([loss for loss, _ in found], weights=[rows["weights"].sum() for rows in held_out])
        visits = np.sum([visits for _, visits in found], axis=0)
        loads = {"largest_load": (visits / visits.mean(-1, keepdims=True)).max()} if visits.size else {}
        return {"validation": float(train.bits_per_byte(float(mean), held_out)), **loads}

    tokens = batch_size * seq_len
    for name in runs:
        active = zoo.models.count_active_parameters(shapes[name])
        flops = 6 * tokens * (active + layers * embed * seq_len)  # a multiply-add forward, two backward; causal
        model = zoo.init(partial(make, RUNS[name]), key, mesh)
        opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
        batches = corpus.train.batches(seq_len, batch_size, seed=seed)
        with train.Run(out / name, config=config | {"run": name}, resume=resume, profile=profile) as run:
            run.print_line(f"{name}: {zoo.count(model):,} parameters, a token meets {active:,}; on {mesh}; {corpus}")
            model, opt_state = run.restore((model, opt_state), batches)
            for inputs in run.steps(batches, steps, tokens=tokens, flops=flops):
                model, opt_state, loss, visits = step(zoo.place_batch(inputs, mesh), model, opt_state, RUNS[name])
                run.log(loss=loss)
                if visits and run.every(max(steps // 100, 1)):
                    run.log(visits=jnp.stack(visits))
                measured = validate(model) if run.every(eval_every) else {}
                run.log(**measured)
                if run.due(eval_every):
                    run.save((model, opt_state), batches, metric=measured.get("validation"))
        if run.stopped:
            return

    rows = [summed_up(name, out / name, shapes[name]) for name in runs]
    results = {row["run"]: f"{row['bits per byte']:.3f} bits per byte" for row in rows}
    report = train.write_report(
        out,
        title="A mixture of experts beside a dense model",
        summary=f"Held-out text after {steps * tokens:,} tokens on {mesh}: {', '.join(map(' '.join, results.items()))}",
        runs={name: out / name for name in runs},
        curves={"validation": "validation"},
        unit="bits per byte",
        tokens_per_step=tokens,
        tables={"In the end": rows},
        heatmaps={"visits": "The load of each expert"},
        parameters=layouts[runs[-1]],
    )
    for name, result in results.items():
        print(f"{name:>12}: {result}")
    print(f"the report lies in {report}")


def summed_up(name, folder, model):
    """What a run came to, from its folder."""
    last = {name: value for line in train.read_metrics(folder / "metrics.jsonl") for name, value in line.items()}
    speeds = [line.get("tokens_per_second") for line in train.read_metrics(folder / "timing.jsonl")]
    return {
        "run": name,
        "parameters": zoo.count(model),
        "active": zoo.models.count_active_parameters(model),
        "bits per byte": last["validation"],
        "largest load": last.get("largest_load", "none"),
        "tokens/s": round(float(np.median([speed for speed in speeds if speed] or [0]))),
    }


if __name__ == "__main__":
    train.run_cli(main)
