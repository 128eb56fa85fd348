"""Every mixer on every mesh axis, against one device: measure the tables of docs/parallelism.md.

    python -m tests.docs.parallel_matrix                      # measure every cell, and write the page
    python -m tests.docs.parallel_matrix measured.json        # only cells that this file lacks, which it then has

Run it in the root of the repository. Every cell compiles a small program, in 1 to 3 seconds of an idle core; a mesh
that two tables have is measured once. A new mixer is a line of `MIXERS`, a new mesh one of `AXES` or `TABLES`.
"""

import json
import math
import sys
from functools import cache, partial
from pathlib import Path

from tests import conftest  # noqa: F401, it sets XLA's flags before JAX reads them
from zoo.layers.token_info import pack_positions

# isort: split

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import zoo
from zoo.layers import (
    HGRN2,
    MLSTM,
    RGLRU,
    RWKV4,
    RWKV6,
    RWKV7,
    AlibiAttention,
    Attention,
    Comba,
    CompressedAttention,
    DeltaNet,
    DifferentialAttention,
    DoubleGatedConvolution,
    ForgettingAttention,
    GatedAttention,
    GatedConvolution,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    GroupedGatedDeltaNet,
    IndexedAttention,
    KimiDeltaAttention,
    LatentAttention,
    Lightning,
    LinearAttention,
    Mamba,
    Mamba2,
    Mamba3,
    MesaNet,
    MixtureOfBlockAttention,
    NativeSparseAttention,
    PostRotaryAttention,
    Retention,
    SparseLatentAttention,
)
from zoo.layers.attention.cross import CrossAttention
from zoo.layers.attention.cross_layer import CrossLayerAttention
from zoo.layers.attention.relative_bias import RelativeBiasAttention
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.layers.ngram import NGramMemory
from zoo.models.hf.families.deberta_v2_layers import DisentangledAttention
from zoo.models.hf.families.falcon_h1_layers import SideBySide
from zoo.models.hf.families.gsa_layers import GatedSlotAttention
from zoo.models.hf.families.jetmoe_layers import MixtureOfAttention
from zoo.models.hf.families.llama4_text_layers import ChunkedAttention
from zoo.models.hf.families.mimo_v2_flash_layers import ValueScaledAttention
from zoo.models.hf.families.rwkv_layers import RWKVChannelMixing
from zoo.models.hf.families.zamba_layers import MultiHeadMamba
from zoo.ops.rotary import Rotary

VOCAB, EMBED, HEADS, ROWS, SEQ = 32, 16, 2, 8, 16
MICROBATCHES = 4
"""Of a pipeline."""
KEY = jax.random.key(0)
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 2e-5
SEEDS = range(3)

SIBLINGS = {
    *(AlibiAttention, ChunkedAttention, CrossLayerAttention, GatedAttention, PostRotaryAttention, ValueScaledAttention),
    *(BidirectionalAttention, DisentangledAttention, GroupedGatedDeltaNet, MixtureOfAttention, SparseLatentAttention),
    *(DoubleGatedConvolution, MultiHeadMamba, RelativeBiasAttention, SideBySide, GatedSlotAttention),
    *(CompressedAttention, IndexedAttention, MixtureOfBlockAttention, NativeSparseAttention, CrossAttention),
    NGramMemory,
}
"""Mixers of checkpoint families, which compute as those of the tables do; each of their families is held on a mesh by
`tests/weights/test_families_on_meshes.py`. Attention to chosen blocks is attention with a mask, held on meshes by its
own tests, as is a memory of n-grams."""
MIXERS = {
    "softmax attention": partial(Attention, heads=HEADS, rotary=Rotary(8)),
    "windowed attention": partial(Attention, heads=HEADS, kv_heads=1, window=5),
    "forgetting attention": partial(ForgettingAttention, heads=HEADS),
    "differential attention": partial(DifferentialAttention, heads=HEADS, rotary=Rotary(4)),
    "latent attention": partial(LatentAttention, heads=HEADS, latent=8, head_dim=4, rotary=Rotary(4)),
    "Mamba": partial(Mamba, state_dim=3, rank=2),
    "Mamba-2": partial(Mamba2, heads=HEADS, head_dim=8, groups=2, state_dim=3),
    "Mamba-3": partial(Mamba3, heads=HEADS, head_dim=8, state_dim=4, rank=2),
    "linear attention": partial(LinearAttention, heads=HEADS),
    "GLA": partial(GatedLinearAttention, heads=HEADS),
    "RetNet": partial(Retention, heads=HEADS),
    "lightning attention": partial(Lightning, heads=HEADS, depth=0.5),
    "HGRN2": partial(HGRN2, heads=HEADS, bound=0.25),
    "RWKV-4": partial(RWKV4, inner=16),
    "RWKV-4 channel mixing": partial(RWKVChannelMixing, mlp=24),
    "RWKV-6": partial(RWKV6, heads=HEADS, rank=3, decay_rank=5),
    "RWKV-7": partial(RWKV7, heads=HEADS, rank=3),
    "DeltaNet": partial(DeltaNet, heads=HEADS),
    "Gated DeltaNet": partial(GatedDeltaNet, heads=HEADS, key_dim=4, value_dim=8),
    "Gated DeltaProduct": partial(GatedDeltaProduct, heads=HEADS),
    "KDA": partial(KimiDeltaAttention, heads=HEADS),
    "Gated DeltaNet-2": partial(GatedDeltaNet2, heads=HEADS),
    "Comba": partial(Comba, heads=HEADS, key_dim=4, value_dim=8),
    "MesaNet": partial(MesaNet, heads=HEADS, key_dim=4, value_dim=8),
    "RG-LRU": partial(RGLRU, heads=HEADS, inner=16),
    "mLSTM": partial(MLSTM, heads=HEADS),
    "gated convolution": partial(GatedConvolution, conv_width=4),
}

MIXTURE = "mixture of experts"
LAYERS = (*MIXERS, MIXTURE)
"""Rows of a table: models of one mixer, and one of attention and a mixture of experts."""

AXES = {
    "data": {"data": 2},
    "fsdp": {"fsdp": 2},
    "tensor": {"tensor": 2},
    "`SEQUENCE`": {"tensor": 2},
    "context": {"context": 2},
    "expert": {"expert": 2},
    "pipe": {"pipe": 2},
}
"""Columns of a table, each with its mesh; `SEQUENCE` is a layout of `tensor`."""
TABLES = {
    "Each axis alone, of size 2": {},
    "Each axis with data 2 and tensor 2": {"data": 2, "tensor": 2},
    "Each axis with fsdp 2": {"fsdp": 2},
}
"""Titles, each with the mesh axes that join those of a column."""

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
COMMAND = "python -m tests.docs.parallel_matrix"
START, END = f"<!-- Written by `{COMMAND}`. -->", "<!-- until here -->"


def make_mesh(axis, table):
    """Make the mesh of one column of one table, over as many devices as it needs."""
    sizes = {"data": 1} | AXES[axis] | TABLES[table]
    layout = zoo.parallel.SEQUENCE if axis == "`SEQUENCE`" else None
    return zoo.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())], layout=layout)


def name_mesh(axis, table):
    """Return one name for equal meshes, which are measured once."""
    sizes = {name: size for name, size in sorted((AXES[axis] | TABLES[table]).items()) if size > 1}
    return " x ".join(sizes) + (", SEQUENCE" if axis == "`SEQUENCE`" else "")


def make(name, layers, key):
    if name == MIXTURE:
        return zoo.models.MixtureOfExperts(
            vocab=VOCAB, embed=EMBED, layers=layers, heads=HEADS, mlp=8, experts=4, top=2, shared=8, key=key
        )
    return zoo.models.Hybrid(vocab=VOCAB, embed=EMBED, layers=layers, pattern=[MIXERS[name]], key=key)


@cache
def make_batch():
    """Two documents of different lengths per row, and padding, which begin and end on any device."""
    draw = np.random.default_rng(0)
    text = draw.integers(0, VOCAB, (ROWS, SEQ + 1))
    lengths, index = draw.integers(3, SEQ + 1, (ROWS, 1)), np.arange(SEQ)
    segment_ids = jnp.asarray(np.where(index < lengths // 2, 1, 2) * (index < lengths))
    return {
        "tokens": jnp.asarray(text[:, :-1]),
        "targets": jnp.asarray(text[:, 1:]),
        "weights": (segment_ids > 0).astype(jnp.float32),
        "segment_ids": segment_ids,
        "positions": pack_positions(segment_ids),
    }


def loss_fn(model, batch):
    return zoo.cross_entropy(model, batch)


def perturb_last_place(model, seed):
    """Change every parameter by about one unit in the last place."""
    draw = np.random.default_rng(seed)
    move = lambda x: jnp.asarray(x * (1 + 1.2e-7 * draw.choice([-1, 1], x.shape)), x.dtype)
    return jax.tree.map(lambda x: move(x) if eqx.is_inexact_array(x) else x, model)


@cache
def compute_on_one_device(name, layers):
    """Return a model, its loss and gradients without a mesh, and the gradients of perturbed models."""

    batch = make_batch()

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def serial(model):
        total, count = loss_fn(model, batch)
        return total / count

    model = eqx.filter_jit(make)(name, layers, KEY)
    loss, gradients = jax.device_get(serial(model))
    gradients = zoo.trainable(gradients)  # as on a mesh, without buffers
    perturbed = [zoo.trainable(jax.device_get(serial(perturb_last_place(model, seed))[1])) for seed in SEEDS]
    return model, loss, gradients, perturbed


def find_deviation(gradients, expected):
    """Return the largest difference of gradients, each relative to its leaf's largest number (or, for a leaf with next
    to no gradient, to a thousandth of the model's)."""
    pairs = list(zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True))
    floor = 1e-3 * max(np.abs(b).max() for _, b in pairs)
    errors = [np.abs(a - b).max() / max(np.abs(b).max(), floor) for a, b in pairs]
    return float(max(errors) if np.isfinite(errors).all() else np.inf)


def measure(name, mesh):
    """Return deviations of loss and gradients from one device, and those by rounding, as perturbed models show it.

    The model has a layer for each stage of a pipeline."""
    stages = mesh.shape["pipe"]
    model, expected_loss, expected, perturbed = compute_on_one_device(name, stages)
    run = zoo.value_and_grad(loss_fn, mesh, microbatches=MICROBATCHES if stages > 1 else 1)
    loss, gradients = jax.device_get(run(zoo.place(model, mesh), make_batch()))
    return {
        "loss": float(abs(loss - expected_loss) / abs(expected_loss)),
        "gradients": find_deviation(gradients, expected),
        "rounding": max(find_deviation(others, expected) for others in perturbed),
    }


def measure_or_raise(name, axis, table):
    """Return what `measure` does, or the message of a mesh that is refused."""
    try:
        return measure(name, make_mesh(axis, table))
    except (NotImplementedError, ValueError) as error:
        return {"message": format_message(error)}


def format_message(error):
    return f"`{type(error).__name__}`: {' '.join(str(error).split())}"


def format_deviation(x):
    return f"{x:.0e}".replace("e-0", "e-") if x else "0"


def is_equal(cell):
    """Return True if loss and gradients agree with one device, or gradients within the measured rounding."""
    return cell["loss"] < LOSS_TOLERANCE and cell["gradients"] < max(GRADIENT_TOLERANCE, cell["rounding"])


def format_cell(cell, messages):
    """Return the text of a cell: the larger deviation, or the number of a message, which `messages` then has."""
    if message := cell.get("message"):
        messages.setdefault(message, len(messages) + 1)
        return f"raises ({messages[message]})"
    worst = format_deviation(max(cell["loss"], cell["gradients"]))
    if not is_equal(cell):
        return f"**deviates: {worst}**"
    is_rounding = cell["gradients"] >= GRADIENT_TOLERANCE
    return f"{worst} (rounding {format_deviation(cell['rounding'])})" if is_rounding else worst


def write_tables(results):
    """Return the Markdown of all tables, and the messages below them."""
    lines, messages = [], {}
    for table in TABLES:
        lines += [f"{table}:", ""]
        lines += ["| layer | " + " | ".join(AXES) + " |", "|---" * (1 + len(AXES)) + "|"]
        for name in LAYERS:
            cells = [format_cell(results[name][name_mesh(axis, table)], messages) for axis in AXES]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    for message, number in messages.items():
        lines += [f"({number}) {message}", ""]
    return "\n".join(lines).rstrip()


def read_tables(page):
    """Return the text of each cell on a page, by table, layer and column."""
    cells, table, header = {}, "", []
    for line in page.partition(START)[2].partition(END)[0].splitlines():
        row = [text.strip() for text in line.strip("|").split("|")]
        if row[0] == "layer":
            header = row[1:]
        elif line.startswith("| "):
            cells |= {(table, row[0], axis): text for axis, text in zip(header, row[1:], strict=True)}
        elif line.endswith(":"):
            table = line.removesuffix(":")
    return cells


def main(file=None):
    results = json.loads(Path(file).read_text(encoding="utf-8")) if file and Path(file).exists() else {}
    for name in LAYERS:
        row = results.setdefault(name, {})
        for table in TABLES:
            for axis in AXES:
                if (mesh := name_mesh(axis, table)) not in row:
                    row[mesh] = measure_or_raise(name, axis, table)
                    print(name, mesh, row[mesh], flush=True)
                    if file:
                        Path(file).write_text(json.dumps(results), encoding="utf-8")
        compute_on_one_device.cache_clear()
        jax.clear_caches()
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    text = f"{before}{START}\n\n{write_tables(results)}\n\n{END}{rest.partition(END)[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
