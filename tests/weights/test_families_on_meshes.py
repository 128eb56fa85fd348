"""Hold every family's fixture on data 2 x fsdp 2 x tensor 2, with packed rows and adapters, to separate rows on one
device."""

from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers.token_info import pack_positions
from zoo.models.parameter_paths import list_parameter_paths
from zoo.tools.parity.checkpoint import make_loss, read_expectations

FIXTURES = Path(__file__).parents[1] / "fixtures"
QUICK = ("deepseek_v3", "modernbert_texts")
"""A decoder with latent attention and a mixture of experts, and an encoder. The others are run by
`pytest -m slow tests/weights/test_families_on_meshes.py`; layers/recurrent/test_mixers.py has a recurrence on a mesh by
default."""
LENGTHS = (6, 9)
AXES = ("data", "fsdp", "tensor")
HYBRIDS = (
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "nemotron_h_latent"),
    *("lara_mini", "recurrent_gemma", "zamba", "zamba2"),
)
"""Cases of models with attention in some layers and a recurrence in others, some of each family."""


def list_fixtures(kind: str, quick: tuple[str, ...]) -> list:
    folders = sorted((FIXTURES / kind).iterdir())
    marks = lambda folder: () if folder.name in quick else pytest.mark.slow
    return [pytest.param(folder, id=folder.name, marks=marks(folder)) for folder in folders]


def draw_texts(vocab: int, lengths: tuple[int, ...] = LENGTHS) -> tuple[dict, dict]:
    """Return eight rows of two texts each, packed, and the same texts in rows of their own, padded right."""
    texts = [np.random.default_rng(0).integers(0, vocab, (8, length)) for length in lengths]
    segments = np.repeat(1 + np.arange(len(lengths)), lengths)[None].repeat(8, 0)
    targets = [np.concatenate([text[:, 1:], np.full((8, 1), -100)], 1) for text in texts]
    packed = {"tokens": np.concatenate(texts, 1), "targets": np.concatenate(targets, 1), "segment_ids": segments}
    pad = lambda row: np.pad(row, [(0, 0), (0, max(lengths) - row.shape[1])])
    mask = np.concatenate([pad(np.ones_like(text)) for text in texts]) > 0
    tokens, targets = (np.concatenate([*map(pad, rows)]) for rows in (texts, targets))
    alone = {"tokens": tokens, "targets": np.where(mask, targets, -100), "segment_ids": mask.astype(int)}
    return tuple(rows | {"positions": pack_positions(jnp.asarray(rows["segment_ids"]))} for rows in (packed, alone))


def compare_meshes(
    model, batch: dict, wanted_batch: dict, loss_fn: Callable = zoo.cross_entropy, axes: tuple[str, ...] = AXES
) -> None:
    many, one = zoo.make_mesh(**dict.fromkeys(axes, 2)), zoo.make_mesh(devices=jax.devices()[:1])
    with jax.default_matmul_precision("highest"):
        results = [
            zoo.value_and_grad(loss_fn, mesh)(zoo.place(model, mesh), zoo.place_batch(rows, mesh))
            for mesh, rows in ((many, batch), (one, wanted_batch))
        ]
    (loss, grads), (wanted_loss, wanted) = jax.device_get(results)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    for name, x, y in zip(list_parameter_paths(wanted), jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert np.abs(x - y).max() <= 1e-4 * max(np.abs(y).max(), 0.01 * largest), name


@pytest.mark.ci
@pytest.mark.parametrize("folder", list_fixtures("models", QUICK))
def test_packed_rows_on_a_mesh_equal_rows_on_one_device(folder: Path):
    """In value, and in the gradient of every parameter."""
    model = zoo.load(folder, dtype=jnp.float32)
    compare_meshes(model, *draw_texts(model.embedding.table_shape[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_rows_on_context_equal_rows_on_one_device(name):
    """Where `context` shards a document, attention and recurrence both go on from the shard before."""
    model = zoo.load(FIXTURES / "models" / name, dtype=jnp.float32)
    texts = draw_texts(model.embedding.table_shape[0], lengths=(6, 10))
    compare_meshes(model, *texts, axes=("data", "context", "tensor"))


def adapt(model):
    """Wrap every linear layer with a LoRA whose A and B are not zero."""
    adapted = zoo.adapters.lora(model, targets="all-linear", rank=2, key=jax.random.key(1))
    shake = lambda x: None if x is None else 0.1 * jnp.cos(jnp.arange(float(x.size))).reshape(x.shape)
    return eqx.combine(jax.tree.map(shake, zoo.trainable(adapted)), adapted)


@pytest.mark.parametrize("folder", list_fixtures("models", ()))
def test_adapters_on_a_mesh_equal_those_on_one_device(folder: Path):
    model = zoo.load(folder, dtype=jnp.float32)
    compare_meshes(adapt(model), *draw_texts(model.embedding.table_shape[0]))


@pytest.mark.ci
@pytest.mark.parametrize("folder", list_fixtures("encoders", QUICK))
def test_encoders_on_a_mesh_equal_one_device(folder: Path):
    """With padding."""
    model = zoo.load(folder, dtype=jnp.float32)
    loss_fn, batch = make_loss(model, read_expectations(folder / "expected.safetensors"))
    batch = jax.tree.map(lambda x: np.concatenate([x, x]), batch)
    compare_meshes(model, batch, batch, loss_fn)


@pytest.mark.parametrize("folder", list_fixtures("encoders", ()))
def test_adapters_of_encoders_on_a_mesh_equal_one_device(folder: Path):
    model = zoo.load(folder, dtype=jnp.float32)
    loss_fn, batch = make_loss(model, read_expectations(folder / "expected.safetensors"))
    batch = jax.tree.map(lambda x: np.concatenate([x, x]), batch)
    compare_meshes(adapt(model), batch, batch, loss_fn)
