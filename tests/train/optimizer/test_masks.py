"""Optimizer masks follow dims, not ranks, since layers are stacked."""

import functools
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import jax
import optax
import pytest
from jaxtyping import Array, Float

import zoo
from zoo import adapters, models, train
from zoo.models.segment import Segment
from zoo.parallel import Dim, Module, no_weight_decay
from zoo.parallel.rounds import split_rounds

FIXTURES = Path(__file__).parents[2] / "fixtures"

SIZES = {"vocab": 16, "embed": 32, "layers": 4}
EMBEDDING, HEAD, FILTERS = "Embedding.weight", "Linear.weight vocab", "ShortConvolution.weight"
PRESETS = {
    models.Transformer: (),
    models.MixtureOfExperts: (),
    models.LinearTransformer: (),
    models.LightningTransformer: (),
    models.RetNet: (),
    models.GLA: (),
    models.HGRN2: (),
    models.XLSTM: (),
    models.DeltaNet: (FILTERS,),
    models.GatedDeltaNet: (FILTERS,),
    models.GatedDeltaProduct: (FILTERS,),
    models.KimiLinear: (FILTERS,),
    models.Griffin: (FILTERS,),
    models.Mamba: (FILTERS, "Mamba.A_log"),
    models.Mamba2: (FILTERS,),
    models.Mamba3: ("Mamba3.B_bias", "Mamba3.C_bias"),
    models.RWKV6: ("RWKV6.bonus",),
    models.RWKV7: ("RWKV7.removal", "RWKV7.replacement", "RWKV7.bonus"),
    models.ModernBERT: (),
}
"""Parameters of more than one dim that are not matrices, besides the embedding."""
NEITHER = {
    "Mamba.A_log",
    "MambaHead.A_log",
    "Mamba3.B_bias",
    "Mamba3.C_bias",
    "RWKV6.bonus",
    "RWKV7.removal",
    "RWKV7.replacement",
    "RWKV7.bonus",
    "ImageEmbedding.register_tokens",
}
"""Parameters of more than one dim that do not decay, in any model."""
DECAY = {
    EMBEDDING,
    HEAD,
    FILTERS,
    "Linear.weight classes",
    "NGramTable.weight",
    "PositionEmbedding.weight",
    "TokenTypeEmbedding.weight",
    "RelativeBias.weight",
    "RelativeEmbedding.weight",
    "PatchEmbedding.weight",
    "PatchPositions.weight",
    "AxisPositions.weight",
    "GridPositions.weight",
    "BiasedEmbedding.weight",
    "FrameConvolution.weight",
}
"""Parameters that decay and are not matrices, in any model."""


def named(tree):
    return {
        leaf.name.split(".")[-2]: x for leaf, x in zip(zoo.parallel.leaves(tree), jax.tree.leaves(tree), strict=True)
    }


def model(key):
    return zoo.models.Transformer(vocab=16, embed=8, layers=3, heads=2, mlp=8, tied=False, key=key)


def name_fields(tree) -> Iterator[str]:
    """Yield "Class.field" for each array, with the dim of the outputs for a head."""
    for (path, _), leaf in zip(jax.tree_util.tree_flatten_with_path(tree)[0], zoo.parallel.leaves(tree), strict=True):
        node, owner = tree, ""
        for step in path:
            if isinstance(node, Module):
                owner = f"{type(node).__name__}.{step.name}"
            node = getattr(node, step.name) if hasattr(step, "name") else node[step.idx]
        out = leaf.unstacked_dims[0].name if len(leaf.unstacked_dims) > 1 else ""
        yield f"{owner} {out}" if owner == "Linear.weight" and out in ("vocab", "classes") else owner


def sort_fields(tree) -> tuple[set[str], set[str], set[str]]:
    """Return the fields that are matrices; that decay and are not; and those of more than one dim that do neither."""
    parameters = zoo.trainable(tree)
    matrices, decaying, neither = set(), set(), set()
    masks = (jax.tree.leaves(mask(parameters)) for mask in (train.matrix_mask, train.decay_mask))
    for name, leaf, is_matrix, decays in zip(
        name_fields(parameters), zoo.parallel.leaves(parameters), *masks, strict=True
    ):
        assert decays or not is_matrix
        if is_matrix:
            matrices.add(name)
        elif decays:
            decaying.add(name)
        elif len(leaf.unstacked_dims) > 1:
            neither.add(name)
    return matrices, decaying, neither


@functools.cache
def shapes(preset):
    options = {"mlp": 32, "heads": 2} if preset not in (models.Mamba, models.Mamba2) else {}
    options |= {"experts": 4, "top": 2} if preset is models.MixtureOfExperts else {}
    return eqx.filter_eval_shape(lambda key: preset(**SIZES, **options, key=key), jax.random.key(0))


def test_masks_of_a_stacked_transformer():
    parameters = zoo.trainable(model(jax.random.key(0)))
    matrices = {"query", "key", "value", "out", "gate", "up", "down"}
    for mask, expected in (
        (train.decay_mask, matrices | {"embedding", "head"}),
        (train.matrix_mask, matrices),
    ):
        found = named(mask(parameters))
        assert {name for name, yes in found.items() if yes} == expected
        assert set(found) == matrices | {"embedding", "head", "mixer_norm", "ffn_norm", "norm"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.__name__)
def test_masks_of_each_model_from_scratch(preset):
    matrices, decaying, neither = sort_fields(shapes(preset))
    assert matrices == {"Linear.weight"}
    assert neither == {name for name in PRESETS[preset] if name in NEITHER}
    assert decaying - {HEAD} == {EMBEDDING, *PRESETS[preset]} - neither


@pytest.mark.ci
def test_masks_of_all_families():
    found = [set(), set(), set()]
    for file in FIXTURES.glob("*/*/config.json"):
        for fields, new in zip(found, sort_fields(zoo.load(file.parent)), strict=True):
            fields |= new
    matrices, decaying, neither = found
    assert matrices == {"Linear.weight"}
    assert decaying == DECAY
    rates = {"Mamba.A_log", "MambaHead.A_log", "Mamba3.B_bias", "Mamba3.C_bias"}
    rates |= {"RWKV6.bonus", "RWKV7.bonus", "RWKV7.removal", "RWKV7.replacement"}
    assert neither == rates | {"ImageEmbedding.register_tokens", "TokenCompressor.places"}


@pytest.mark.parametrize("preset", [models.Mamba, models.Mamba2])
def test_rates_of_both_mambas_do_not_decay(preset):
    parameters = zoo.trainable(shapes(preset))
    leaves, decays = zoo.parallel.leaves(parameters), jax.tree.leaves(train.decay_mask(parameters))
    fields = {leaf.name.rpartition(".")[2]: yes for leaf, yes in zip(leaves, decays, strict=True)}
    assert not any(fields[name] for name in ("A_log", "D", "dt_bias"))


def test_stacked_norms_and_attention_count_one_module():
    """`stacked("heads")` and `stacked("choices")`: the dims do not count, as those of layers."""
    parameters = zoo.trainable(zoo.load(FIXTURES / "models" / "stablelm"))
    decays = jax.tree.leaves(train.decay_mask(parameters))
    norms = [yes for name, yes in zip(name_fields(parameters), decays, strict=True) if name == "LayerNorm.weight"]
    assert norms and not any(norms)
    parameters = zoo.trainable(zoo.load(FIXTURES / "models" / "jetmoe"))
    is_matrix = jax.tree.leaves(train.matrix_mask(parameters))
    leaves = zoo.parallel.leaves(parameters)
    choices = [yes for leaf, yes in zip(leaves, is_matrix, strict=True) if Dim("choices") in leaf.dims[:-2]]
    assert choices and all(choices)


def test_masks_of_adapters():
    """Maps of low rank are matrices; a table of an embedding is not, nor are OFT's rotations, in one block or many."""
    base = model(jax.random.key(0))
    adapted = adapters.lora(base, targets=("query", "embedding"), rank=2, key=jax.random.key(1))
    assert sort_fields(adapted) == ({"Linear.weight"}, {"EmbeddingLoRA.down"}, set())
    for shared in (False, True):
        rotated = adapters.oft(base, targets="query", block_size=4, shared=shared)
        matrices, decaying, neither = sort_fields(rotated)
        assert (matrices, decaying) == (set(), set())
        assert neither == (set() if shared else {"OFT.blocks"})


def test_masks_of_a_layer_of_ones_own():
    class Filters(Module):
        taps: Float[Array, "inner conv"]
        rates: Float[Array, "inner state"] = no_weight_decay(full_precision=True)
        mix: Float[Array, "inner embed"]

    ones = jax.numpy.ones((4, 4))
    filters = Filters(ones, ones, ones)
    decays, is_matrix = train.decay_mask(filters), train.matrix_mask(filters)
    assert (decays.taps, decays.rates, decays.mix) == (True, False, True)
    assert (is_matrix.taps, is_matrix.rates, is_matrix.mix) == (False, False, True)
    cast = zoo.cast(filters, "bfloat16")
    assert (cast.taps.dtype, cast.rates.dtype) == ("bfloat16", "float32")


def test_matrix_mask_numbers_the_dims_for_muon():
    """As the docstring says: each layer's matrix is orthogonalized by itself, and the embedding takes Adam's step."""

    def number_dims(params):
        number = lambda is_matrix: optax.contrib.MuonDimensionNumbers(-1, -2) if is_matrix else None
        return jax.tree.map(number, train.matrix_mask(params))

    parameters = zoo.trainable(model(jax.random.key(0)))
    muon = optax.contrib.muon(1.0, muon_weight_dimension_numbers=number_dims)
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), parameters)
    updates, _ = muon.update(grads, muon.init(parameters), parameters)
    found = named(updates)
    adamw = optax.nadamw(1.0, weight_decay=0.0)
    adam, _ = adamw.update(grads, adamw.init(parameters), parameters)
    alone = optax.contrib.muon(1.0)
    for update, grad in zip(found["query"], named(grads)["query"], strict=True):
        expected, _ = alone.update(grad, alone.init(grad), grad)
        assert abs(update - expected).max() < 1e-5
    assert abs(found["embedding"] - named(adam)["embedding"]).max() < 1e-5


def test_masks_do_not_depend_on_rounds():
    parameters = zoo.trainable(
        zoo.models.Transformer(vocab=16, embed=8, layers=4, heads=2, mlp=8, key=jax.random.key(0))
    )
    for mask in (train.decay_mask, train.matrix_mask):
        assert named(mask(split_rounds(parameters, 2))) == named(mask(parameters))


def test_matrix_mask_excludes_stacked_biases():
    linears = eqx.filter_vmap(lambda key: zoo.layers.Linear(4, 4, bias=True, key=key))
    segment = Segment.__new__(Segment)
    object.__setattr__(segment, "blocks", (linears(jax.random.split(jax.random.key(0), 3)),))
    for dim in ("layers", "ends"):
        object.__setattr__(segment, "layers", Dim(dim))
        mask = train.decay_mask(segment)
        assert mask.blocks[0].weight and not mask.blocks[0].bias
