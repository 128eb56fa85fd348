"""A trainable state: of a text it is the text in the context; training, decoding, padding, meshes, refusals."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from tests.adapters.perturb import perturb
from tests.quick import mark_slow
from zoo import adapters
from zoo.layers import (
    RGLRU,
    RWKV4,
    RWKV7,
    Attention,
    ForgettingAttention,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    MixtureOfBlockAttention,
    PositionEmbedding,
    TokenInfo,
)
from zoo.layers.kv_cache import forget
from zoo.models.parameter_paths import list_parameter_paths
from zoo.ops.rotary import DynamicScaling, Rotary

KEY = jax.random.key(0)
VOCAB, LENGTH, ROWS, SEQ = 32, 4, 2, 7
TEXT = jax.random.randint(jax.random.key(1), (LENGTH,), 0, VOCAB)
TOKENS = jax.random.randint(jax.random.key(2), (ROWS, SEQ), 0, VOCAB)
WHOLE = jnp.concatenate([jnp.broadcast_to(TEXT, (ROWS, LENGTH)), TOKENS], axis=1)
ATTENTION = partial(Attention, heads=2, kv_heads=1, rotary=Rotary(8))
MAMBA = partial(Mamba2, heads=4, head_dim=8, state_dim=4)
PATTERNS = {
    "hybrid": [MAMBA, ATTENTION],
    "window": [partial(Attention, heads=2, rotary=Rotary(8), window=5)],
    "latent": [partial(LatentAttention, heads=2, latent=8, head_dim=8, rotary=Rotary(4))],
    "forgetting": [partial(ForgettingAttention, heads=2)],
    "delta": [partial(GatedDeltaNet, heads=2)],
    "rwkv4": [RWKV4],
    "rwkv7": [partial(RWKV7, heads=2)],
    "rg_lru": [partial(RGLRU, heads=2)],
}


def make_model(pattern, layers=2):
    return zoo.models.Hybrid(vocab=VOCAB, embed=16, layers=layers, mlp=24, pattern=pattern, key=KEY)


@eqx.filter_jit
def run(model, tokens, **options):
    return model(tokens, **options)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=2e-6 * float(jnp.abs(expected).max()), rtol=0)


@pytest.mark.parametrize("name", mark_slow(PATTERNS, but=["hybrid"]))
def test_state_of_a_text_is_the_text_in_the_context(name):
    """Logits, also of rows with padding on either side, and greedy tokens: as the model computes after the text."""
    model = make_model(PATTERNS[name])
    adapted = adapters.state(model, LENGTH, text=TEXT, key=KEY)
    expected = run(model, WHOLE)[:, LENGTH:]
    assert_close(run(adapted, TOKENS), expected)
    padding = jnp.zeros((ROWS, 2), int)
    padded = jnp.concatenate([padding, TOKENS, padding], axis=1)
    mask = jnp.concatenate([padding, 0 * TOKENS + 1, padding], axis=1)
    assert_close(run(adapted, padded, mask=mask > 0)[:, 2:-2], expected)
    np.testing.assert_array_equal(
        zoo.generate(adapted, TOKENS, max_new_tokens=4), zoo.generate(model, WHOLE, max_new_tokens=4)
    )


def test_decoding_with_prefix_or_draft_begins_from_the_state():
    """A state of learned positions and of a window: `prefix=` reads on after it, and a rejected draft keeps it."""
    model = make_model([partial(Attention, heads=2, window=12)])
    learned = PositionEmbedding(24, 16, key=KEY)
    model = eqx.tree_at(lambda model: model.position_embedding, model, learned, is_leaf=lambda x: x is None)
    adapted = perturb(adapters.state(model, LENGTH, key=KEY), 2.0)

    @eqx.filter_jit
    def read(model):
        """Read tokens in two pieces, and the second once more after it was forgotten."""
        positions = jnp.broadcast_to(jnp.arange(SEQ), TOKENS.shape)
        states = model.init_state(ROWS, SEQ)
        first, states = model.hidden(TOKENS[:, :3], TokenInfo(positions[:, :3]), states)
        second, states = model.hidden(TOKENS[:, 3:], TokenInfo(positions[:, 3:]), states)
        states = forget(states, jnp.full(ROWS, 3))
        again, _ = model.hidden(TOKENS[:, 3:], TokenInfo(positions[:, 3:]), states)
        return [model.logits(jnp.concatenate([first.x, x.x], axis=1)) for x in (second, again)]

    for logits in read(adapted):
        assert_close(logits, run(adapted, TOKENS))
    tokens = zoo.generate(adapted, TOKENS, max_new_tokens=6)
    assert (tokens != zoo.generate(adapters.remove(adapted), TOKENS, max_new_tokens=6)).any()
    prefix = zoo.prefill(adapted, TOKENS[:, :3], length=SEQ + 6)
    np.testing.assert_array_equal(zoo.generate(adapted, TOKENS[:, 3:], max_new_tokens=6, prefix=prefix), tokens)
    np.testing.assert_array_equal(zoo.generate(adapted, TOKENS, max_new_tokens=6, draft="prompt"), tokens)
    with pytest.raises(ValueError, match="21 tokens are too many: the model learned 20 positions"):
        adapted(jnp.zeros((1, 21), int))


def mean_loss(trainable, model, batch):
    total, count = zoo.cross_entropy(eqx.combine(trainable, model), batch)
    return total / count


def test_a_step_trains_only_the_state():
    model = adapters.state(make_model(PATTERNS["hybrid"]), LENGTH, frozen=1, key=KEY)
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    batch = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}

    @eqx.filter_jit
    def step(model, state):
        loss, gradients = jax.value_and_grad(mean_loss)(zoo.trainable(model), model, batch)
        updates, state = optimizer.update(gradients, state, zoo.trainable(model))
        return eqx.apply_updates(model, updates), state, loss

    trained, state, losses = model, optimizer.init(zoo.trainable(model)), []
    for _ in range(4):
        trained, state, loss = step(trained, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.05
    for path, old, new in zip(
        list_parameter_paths(model), jax.tree.leaves(model), jax.tree.leaves(trained), strict=True
    ):
        is_trained = ".state." in path.name and path.name.endswith("array")
        assert np.array_equal(old, new) != is_trained, path.name
    block = trained.stack.segments[0].blocks[1]
    assert block.values[0].array.shape == (1, LENGTH - 1, 1, 8)
    assert block.values[0].frozen.shape == (1, 1, 1, 8)
    assert eqx.tree_equal(adapters.remove(trained), adapters.remove(model))


@pytest.mark.parametrize("layout", mark_slow(["fsdp", "pipe", "tokens"], but=["fsdp"]))
def test_state_on_a_mesh_matches_one_device(layout):
    """Values, gradients and greedy tokens; one KV head is replicated over tensor."""
    sizes = {
        "fsdp": {"data": 2, "fsdp": 2, "tensor": 2},
        "pipe": {"data": 1, "pipe": 2, "fsdp": 2, "devices": jax.devices()[:4]},
        "tokens": {"data": 1, "fsdp": 2, "tensor": 2, "layout": zoo.parallel.SEQUENCE, "devices": jax.devices()[:4]},
    }
    model = perturb(adapters.state(make_model(PATTERNS["hybrid"], layers=4), LENGTH, key=KEY), 0.3)
    tokens = jax.random.randint(KEY, (8, 8), 0, VOCAB)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}
    loss, gradients = eqx.filter_jit(jax.value_and_grad(mean_loss))(zoo.trainable(model), model, batch)
    mesh = zoo.make_mesh(**sizes[layout])
    placed = zoo.place(model, mesh)
    found, found_gradients = zoo.value_and_grad(zoo.cross_entropy, mesh)(placed, zoo.place_batch(batch, mesh))
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(found_gradients), strict=True):
        np.testing.assert_allclose(y, x, atol=2e-5 * float(jnp.abs(x).max()))
    if layout == "fsdp":
        decoded = zoo.generate(placed, tokens, max_new_tokens=3, mesh=mesh)
        np.testing.assert_array_equal(decoded, zoo.generate(model, tokens, max_new_tokens=3))


def test_packed_documents_are_refused():
    """By name where segment ids can be read; inside programs their row is NaN, and the others are right."""
    model = adapters.state(make_model([ATTENTION], layers=1), LENGTH, key=KEY)
    segments = jnp.array([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 2, 2]])
    with pytest.raises(ValueError, match="a row begins once from 'state': give each document a row of its own"):
        model(TOKENS, segment_ids=segments)
    logits = run(model, TOKENS, segment_ids=segments)
    assert jnp.isnan(logits[1]).all()
    assert_close(logits[:1, 1:6], run(model, TOKENS[:1, 1:6]))


def test_context_is_refused_in_training():
    model = adapters.state(make_model([ATTENTION], layers=1), LENGTH, key=KEY)
    mesh = zoo.make_mesh(data=1, context=2, devices=jax.devices()[:2])
    batch = zoo.place_batch({"tokens": TOKENS[:, :6], "targets": TOKENS[:, 1:]}, mesh)
    with pytest.raises(NotImplementedError, match="'state' is not trained over context"):
        zoo.value_and_grad(zoo.cross_entropy, mesh)(zoo.place(model, mesh), batch)


def test_models_and_arguments_that_do_not_fit_are_refused():
    model = make_model([ATTENTION], layers=1)
    adapted = adapters.state(model, LENGTH, key=KEY)
    scaled = Rotary(8, scaling=DynamicScaling(2.0, 16))
    for wrong, error, message in (
        (lambda: adapters.state(adapted, LENGTH, key=KEY), ValueError, "has a trained state already"),
        (lambda: adapters.state(model, 0, key=KEY), ValueError, "length=0: expected 1 or more"),
        (lambda: adapters.state(model, 3, text=TEXT, key=KEY), ValueError, "a text of as many tokens"),
        (lambda: adapters.state(model, 2, frozen=2, key=KEY), ValueError, "fewer frozen ones"),
        (lambda: adapters.state(make_model(PATTERNS["window"]), 6, key=KEY), ValueError, "layer 0 has a window of 5"),
        (
            lambda: adapters.state(make_model([partial(Attention, heads=2, rotary=scaled)]), 2, key=KEY),
            ValueError,
            "RoPE depends on the length of a text",
        ),
        (lambda: adapters.state(model.head, 2, key=KEY), TypeError, "for a Decoder"),
        (
            lambda: adapters.state(make_model([partial(MixtureOfBlockAttention, heads=2, block=2, top=1)]), 2, key=KEY),
            NotImplementedError,
            "layer 0 keeps ids of tokens, or chooses the tokens that it reads",
        ),
        (lambda: adapters.merge(adapted), ValueError, "no weight holds a trained state"),
        (lambda: adapters.set_strength(adapted, {"state": 0}), ValueError, "state is a trained state"),
        (lambda: adapters.select_per_row(adapted, ["state", None]), ValueError, "which all rows share"),
        (lambda: zoo.save(adapted, "unwritten"), zoo.CheckpointError, "the model has adapters"),
    ):
        with pytest.raises(error, match=message):
            wrong()


def test_a_lora_and_a_state_are_trained_together():
    model = adapters.lora(make_model([ATTENTION], layers=1), rank=2, key=KEY)
    both = perturb(adapters.state(model, LENGTH, adapter_name="memory", key=KEY))
    assert adapters.adapter_names(both) == ["lora", "memory"]
    without = adapters.remove(both, "memory")
    assert adapters.adapter_names(without) == ["lora"]
    assert_close(run(adapters.set_strength(both, {"lora": 0}), TOKENS), run(adapters.remove(both, "lora"), TOKENS))
