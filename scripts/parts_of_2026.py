"""Measure parts of the open models of 2026 in small models: bits per byte at equal FLOPs, and recall.

    python scripts/parts_of_2026.py                          # all parts, in about 40 minutes on one core
    python scripts/parts_of_2026.py --parts attention memory --recall

Each part changes one thing of a byte-level Transformer, which is trained on this Python's standard library for as many
steps as take the FLOPs of the plain one, three seeds at once, at one learning rate. FLOPs are counted as the library
computes: attention to selected keys multiplies all of them, and selects by a mask. The loss of an indexer is not
counted, and mixtures count two experts a token. `--recall` trains the attentions on associative recall, as
recipes/recall.py does, at the best of four learning rates.
"""

import argparse
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zoo
from recipes.recall import mixer_factories
from zoo import layers, train
from zoo.layers.ngram import NGramMemory
from zoo.models import build_decoder
from zoo.models.gated_connections import make_gated_connections, make_ngram_block
from zoo.models.hyper_connections import IndependentHyperConnection, make_hyper_connections
from zoo.ops.rotary import Rotary
from zoo.text.tasks.synthetic import AssociativeRecall
from zoo.train.flops import count_step_flops

VOCAB, EMBED, LAYERS, SEQ, ROWS = 256, 64, 4, 128, 8
RATE = 8e-3
EXPERTS = 8
SEEDS = range(3)
SHAPE = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
KEY = jax.random.key(0)
ROTARY = Rotary(16)


def make_heavy(embed, *, window, block, **options):
    sizes = {"head_dim": embed // 4, "query_latent": embed, "window": window, "out_groups": 2, "out_latent": embed // 2}
    rotary = Rotary(embed // 8)
    return partial(layers.CompressedAttention, embed, 4, rotary=rotary, block=block, **sizes, **options)


def make_sparse(embed, *, window, block, top):
    indexer = partial(layers.BlockIndexer, embed, 4, query_latent=embed, head_dim=16, block=block, top=top)
    return make_heavy(embed, window=window, block=block, overlap=True, indexer=indexer)


def make_indexed(embed, *, heads, block, top, rotary=ROTARY, **options):
    indexer = partial(layers.MeanKeyIndexer, embed, 4, head_dim=16, block=block, top=top)
    options |= {"indexer": indexer, "attention": layers.Attention, "rotary": rotary}
    return partial(layers.IndexedAttention, embed, heads, **options)


def make_mixture(router, identities=0):
    """Return a mixture of eight experts of which two compute a token, with `identities` as a mean over even loads."""
    router = partial(router, EMBED, EXPERTS + identities, 2 * (EXPERTS + identities) // EXPERTS)
    return partial(layers.MixtureOfExperts, router, partial(layers.GatedMLP, EMBED, 64), EXPERTS, identities=identities)


ATTENTION = partial(layers.Attention, EMBED, 4, rotary=ROTARY)
MLP = partial(layers.GatedMLP, EMBED, 128)
PAIR = ATTENTION, MLP
NORM = partial(layers.RMSNorm, EMBED)
GATED = {"norm": layers.IdentityNorm, "wiring": partial(make_gated_connections, EMBED, 4, 16)}
MEMORY = partial(NGramMemory, EMBED, VOCAB, size=4093, boundary=0, streams=4, memory=32, heads=2)
MIXED = partial(make_hyper_connections, EMBED, 4, NORM)


def connect_independently(key):
    """Return the wiring of streams that do not mix."""
    wiring = MIXED(key=key)
    connection = partial(IndependentHyperConnection, EMBED, 4)
    return wiring | {"parts": {"mixer_connection": connection, "ffn_connection": connection}}


def make_parts() -> dict[str, dict[str, Any]]:
    """Return what each part changes: the layers, their norms and their wiring."""
    windowed = partial(ATTENTION, window=16)
    heavy = make_heavy(EMBED, window=16, block=8)
    sparse = make_sparse(EMBED, window=16, block=4, top=4)
    indexed = make_indexed(EMBED, heads=4, block=4, top=4)
    hashed = partial(layers.HashRouter, vocab=VOCAB, score="sqrt_softplus")
    scored = partial(layers.BiasedRouter, score="sqrt_softplus")
    remembered = [MEMORY if n == 1 else None for n in range(LAYERS)]
    alternate = lambda *mixers: [(mixer, MLP) for mixer in mixers] * (LAYERS // len(mixers))
    experts = lambda router, identities=0: [(ATTENTION, make_mixture(router, identities))] * LAYERS
    token_streams = partial(make_hyper_connections, EMBED, 1, NORM, keeps_tokens=True)
    return {
        "attention": {"layers": [PAIR] * LAYERS},
        "window": {"layers": [(windowed, MLP)] * LAYERS},
        "heavy": {"layers": alternate(windowed, heavy)},
        "sparse": {"layers": alternate(windowed, sparse), "indexer": 1.0},
        "indexed": {"layers": alternate(windowed, indexed), "indexer": 1.0},
        "indexed, untrained": {"layers": alternate(windowed, indexed)},
        "mixed streams": {"layers": [PAIR] * LAYERS, "wiring": MIXED},
        "independent streams": {"layers": [PAIR] * LAYERS, "wiring": connect_independently},
        "gated streams": {"layers": [PAIR] * LAYERS, **GATED},
        "memory": {"layers": [PAIR] * LAYERS, **GATED, "memories": remembered},
        "experts": {"layers": experts(layers.SoftmaxRouter)},
        "experts, sqrt(softplus)": {"layers": experts(scored)},
        "experts, some without computation": {"layers": experts(partial(layers.BiasedRouter, score="softmax"), 4)},
        "experts, one stream": {"layers": [(ATTENTION, make_mixture(scored))] * LAYERS, "wiring": token_streams},
        "experts, hashed": {
            "layers": [(ATTENTION, make_mixture(hashed))] * 2 + [(ATTENTION, make_mixture(scored))] * 2,
            "wiring": token_streams,
        },
    }


def make_model(key, *, layers, norm=NORM, wiring=None, memories=None, indexer=0.0):
    """Build a model of parts."""
    options: dict[str, Any] = {}
    if wiring is not None:
        more = {"keeps_tokens": True} if memories else {}
        options = wiring(**more, key=jax.random.fold_in(key, 1))
    if memories is not None:
        remember = lambda memory: partial(make_ngram_block, memory, jax.random.fold_in(key, 2))
        options["block"] = [options["block"] if memory is None else remember(memory) for memory in memories]
    return build_decoder(vocab=VOCAB, embed=EMBED, layers=layers, norm=norm, tied=True, key=key, **options)


def sweep(make, loss_fn, steps, batches, rates):
    """Train a model of each rate and seed at once; return the stacked models."""
    rates, keys = train.sweep_grid(rates, seeds=SEEDS)
    schedule = train.warmup_cosine(1.0, steps // 10, steps, end=0.0)

    def make_optimizer(rate):
        adamw = train.make_optimizer("adamw", lambda step: rate * schedule(step), weight_decay=0.1)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    step = train.sweep_step(loss_fn, make_optimizer)
    models, states = train.sweep_init(make, make_optimizer, rates, keys)
    for _ in range(steps):
        models, states, _ = step(next(batches), models, states, rates)
    return models


def print_row(*cells, values):
    """Print a row of a table that ends with the mean and the range over seeds."""
    print(f"| {' | '.join(cells)} | {values.mean():.3f} | {values.min():.3f} to {values.max():.3f} |", flush=True)


def measure_loss(name, options, corpus, budget, plain):
    """Train one part for a budget of FLOPs, and print its bits per byte on held-out text."""
    make = partial(make_model, **options)
    model = eqx.filter_eval_shape(make, KEY)
    flops = (
        count_step_flops(model, SHAPE) or plain + 6 * EMBED * EXPERTS * LAYERS * ROWS * SEQ
    )  # two experts of half the width, and the router
    steps = round(budget / flops)
    batches = iter(corpus.train.batches(SEQ, ROWS, seed=0))
    loss_fn = partial(zoo.cross_entropy, indexer=options["indexer"]) if "indexer" in options else zoo.cross_entropy
    models = sweep(make, loss_fn, steps, batches, (RATE,))
    tests = list(corpus.validation.ordered(SEQ, ROWS, limit=24))

    @train.sweep_map
    def evaluate(model, batch):
        total, count = zoo.cross_entropy(model, batch)
        return total / count

    losses = np.mean([evaluate(models, test) for test in tests], axis=0) / np.log(2)
    print_row(name, f"{zoo.count(model):,}", f"{flops / ROWS / SEQ / 1e6:.2f}M", str(steps), values=losses)


def measure_recall(name, mixer, indexer, steps):
    """Train one mixer on associative recall of 12 pairs in 64 tokens, and print its accuracy."""
    sizes = (128, 64, 12)
    task = AssociativeRecall(*sizes, seed=0)
    test = train.stack_rows(AssociativeRecall(*sizes, seed=1), 512)
    pattern = (layers.GatedConvolution, mixer)
    make = lambda key: zoo.models.Hybrid(vocab=128, embed=32, layers=2, pattern=pattern, tied=False, key=key)
    loss_fn = partial(zoo.cross_entropy, indexer=indexer) if indexer else zoo.cross_entropy
    batches = iter(train.ShuffledBatches(task, 32, seed=0))
    models = sweep(make, loss_fn, steps, batches, (1e-3, 3e-3, 1e-2, 3e-2))

    @train.sweep_map
    def accuracy(model, batch):
        correct = model(batch["tokens"]).argmax(-1) == batch["targets"]
        return (correct * batch["weights"]).sum() / batch["weights"].sum()

    model = eqx.filter_eval_shape(make, KEY)
    by_rate = np.asarray(accuracy(models, test)).reshape(-1, len(SEEDS))
    best = by_rate[by_rate.mean(1).argmax()]
    print_row(name, f"{zoo.count(model):,}", f"{zoo.inspect.state_bytes(model, 64):,}", values=best)


def list_recalled():
    """Return mixers of one head 32 wide, and the weight of the loss of their indexers."""
    factories = mixer_factories(32)
    heavy = {"head_dim": 32, "query_latent": 32, "out_groups": 1, "out_latent": 32, "rotary": Rotary(8), "window": 8}
    indexer = partial(layers.BlockIndexer, 32, 4, query_latent=32, head_dim=16, block=4, top=4)
    blocks = partial(layers.MeanKeyIndexer, 32, 4, head_dim=16, block=8, top=2)
    indexed = partial(
        layers.IndexedAttention,
        heads=1,
        attention=layers.Attention,
        indexer=blocks,
        qk_norm=factories["attention"].keywords["qk_norm"],
    )
    compressed = partial(layers.CompressedAttention, heads=1, **heavy)
    return {
        "attention": (factories["attention"], 0.0),
        "MoBA": (factories["moba"], 0.0),
        "window of 8": (compressed, 0.0),
        "heavily compressed, blocks of 8": (partial(compressed, block=8), 0.0),
        "compressed sparse, 4 blocks of 4": (partial(compressed, block=4, overlap=True, indexer=indexer), 1.0),
        "indexed, 2 blocks of 8": (indexed, 1.0),
        "indexed, 2 blocks of 8, untrained": (indexed, 0.0),
    }


def main(parts, recall, steps, recall_steps):
    made = make_parts()
    corpus = train.load_text((), vocab=VOCAB)
    plain = count_step_flops(eqx.filter_eval_shape(partial(make_model, **made["attention"]), KEY), SHAPE)
    print("| part | parameters | FLOPs per token | steps | bits per byte | of the seeds |")
    print("|---|--:|--:|--:|--:|---|")
    for name in parts if parts is not None else made:
        measure_loss(name, made[name], corpus, steps * plain, plain)
    if recall:
        print("\n| attention | parameters | bytes of state | recalled | of the seeds |")
        print("|---|--:|--:|--:|---|")
        for name, (mixer, indexer) in list_recalled().items():
            measure_recall(name, mixer, indexer, recall_steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", help="names of parts, all by default")
    parser.add_argument("--recall", action="store_true", help="measure recall, too")
    parser.add_argument("--steps", type=int, default=800, help="steps of the plain model")
    parser.add_argument("--recall-steps", type=int, default=500)
    main(**vars(parser.parse_args()))
