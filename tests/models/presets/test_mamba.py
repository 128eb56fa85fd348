"""Mamba and Mamba-2 from scratch: they train, save and load as their families, and are the same on any mesh."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.models.parameter_paths import find_differences

KEY = jax.random.key(0)
MODELS = {
    "mamba": partial(zoo.models.Mamba, vocab=12, embed=16, layers=2, state_dim=4, rank=3),
    "mamba2": partial(zoo.models.Mamba2, vocab=12, embed=16, layers=2, head_dim=8, groups=2, state_dim=4, tied=False),
}
EACH = pytest.mark.parametrize("name", MODELS)


@pytest.mark.slow
@EACH
def test_mamba_save_and_load_roundtrip(name, tmp_path):
    model = MODELS[name](key=KEY)
    zoo.save(model, tmp_path)
    loaded = zoo.load(tmp_path)
    assert loaded.origin.family.name == name and not list(find_differences(loaded, model))
    assert all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(model)))
    tokens = jnp.arange(10).reshape(2, 5)
    states = zoo.hidden_states(model, tokens)
    assert len(states) == 3 and jnp.allclose(states[2], model.norm(states[1]), atol=1e-5), "last one normalized"
    assert all(map(np.array_equal, states, zoo.hidden_states(loaded, tokens)))


@pytest.mark.one_case("slow")
@EACH
def test_mamba_save_refuses_options_without_a_config(name, tmp_path):
    model = eqx.filter_jit(MODELS[name])(key=KEY)
    for family, message in (
        ("llama", "block is MixerBlock, not Block"),
        ("falcon_mamba", "only models that were read"),
    ):
        with pytest.raises(zoo.CheckpointError, match=message):
            zoo.save(model, tmp_path / "refused", family)
    other = {"mamba": "mamba2", "mamba2": "mamba"}[name]
    with pytest.raises(zoo.CheckpointError, match=f"mixer is {name.capitalize()}, not {other.capitalize()}"):
        zoo.save(model, tmp_path / "refused", other)
    normed = eqx.tree_at(lambda m: m.embedding_norm, model, model.norm, is_leaf=lambda x: x is None)
    with pytest.raises(zoo.CheckpointError, match="embedding_norm"):
        zoo.save(normed, tmp_path / "refused")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_mamba_learns_the_previous_token(name):
    """On a mesh, with the loss of one device."""
    tokens = np.random.default_rng(0).integers(0, 12, (8, 9))
    batch = {"tokens": tokens[:, 1:], "targets": tokens[:, :-1], "weights": np.ones((8, 8), np.float32)}
    batch["weights"][:, 0] = 0  # the token before the first is unknown
    model, mesh = MODELS[name](key=KEY), zoo.make_mesh(data=2, fsdp=2, tensor=2)
    one_device = zoo.make_mesh(devices=jax.devices()[:1])
    losses = [float(zoo.value(zoo.cross_entropy, m)(zoo.place(model, m), batch)) for m in (one_device, mesh)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    step = zoo.value_and_grad(zoo.cross_entropy, mesh)
    model = zoo.place(model, mesh)
    for _ in range(30):
        loss, grads = step(model, batch)
        model = jax.tree.map(lambda x, g: x - 0.5 * g / (1 + jnp.abs(g).max()), model, grads)
    assert loss < 0.7 * losses[0]


@pytest.mark.slow  # weights/test_parity.py decodes recurrent models
def test_mamba2_generation_equals_full_passes():
    """Rows of different lengths, padded on the left; on a mesh too."""
    model = MODELS["mamba2"](key=KEY)
    prompt, mask = np.random.default_rng(0).integers(0, 12, (4, 5)), np.ones((4, 5), bool)
    mask[1, :2] = False
    new = zoo.generate(model, jnp.asarray(prompt), max_new_tokens=3, mask=jnp.asarray(mask))
    texts = [np.concatenate([prompt[row, mask[row]], new[row]]) for row in range(4)]
    all_logits = eqx.filter_jit(model)(jnp.stack([np.pad(text, (0, 8 - len(text))) for text in texts]))
    for text, logits in zip(texts, all_logits, strict=True):
        np.testing.assert_array_equal(logits.argmax(-1)[len(text) - 4 : len(text) - 1], text[-3:])
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    placed = zoo.place(model, mesh)
    on_mesh = zoo.generate(placed, jnp.asarray(prompt), max_new_tokens=3, mask=jnp.asarray(mask), mesh=mesh)
    np.testing.assert_array_equal(on_mesh, new)


def test_mamba_refuses_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="a model has at least 1 layer, not 0"):
        MODELS["mamba"](layers=0, key=KEY)
    with pytest.raises(ValueError, match="does not divide evenly over heads 7 wide"):
        MODELS["mamba2"](head_dim=7, key=KEY)
