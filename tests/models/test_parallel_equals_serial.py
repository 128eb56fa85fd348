"""The definition of correct: loss, gradients and learning curve on every mesh equal those on one device."""

import collections
import contextlib
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo.layers.token_info import pack_positions
from zoo.ops.rotary import DynamicScaling, Rotary
from zoo.parallel import ZERO1
from zoo.train.optimizer.masks import decay_mask

ROWS, SEQ, VOCAB = 16, 12, 96
MODEL_KEY, DATA_KEY, DROP_KEY = jax.random.split(jax.random.key(0), 3)
MESHES = [
    {"data": data, "fsdp": fsdp, "tensor": tensor}
    for data in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    for tensor in (1, 2, 4, 8)
    if data * fsdp * tensor == 8
]
QUICK = {(2, 2, 2)}
"""Sizes that run without `-m slow`: all three axes."""
EACH_MESH = [
    pytest.param(i, id=str(zoo.make_mesh(**sizes)), marks=() if tuple(sizes.values()) in QUICK else pytest.mark.slow)
    for i, sizes in enumerate(MESHES)
]


def make(key, tied=True, **options):
    """Two block structures, and fewer kv heads than some meshes have devices along `tensor`."""
    sizes = {"vocab": VOCAB, "embed": 32, "layers": 4, "heads": 8, "kv_heads": 2, "mlp": 64}
    options = sizes | {"windows": (5, None), "qk_norm": True, "dropout": 0.2} | options
    return zoo.models.Transformer(**options, tied=tied, key=key)


def make_batch():
    """Rows of different lengths with two documents each, so that devices have different numbers of tokens."""
    text_key, length_key = jax.random.split(DATA_KEY)
    text = jax.random.randint(text_key, (ROWS, SEQ + 1), 0, VOCAB)
    index, lengths = jnp.arange(SEQ), jax.random.randint(length_key, (ROWS, 1), 2, SEQ + 1)
    segment_ids = jnp.where(index < lengths // 2, 1, 2) * (index < lengths)
    return {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "weights": (index < lengths).astype(jnp.float32) * jnp.linspace(0.1, 1, ROWS)[:, None],
        "segment_ids": segment_ids,
        "positions": pack_positions(segment_ids),
    }


def loss_fn(model, batch, key=None):
    return zoo.cross_entropy(model, batch, key=key, z_loss=1e-3, chunk=10)


@functools.cache
def make_unsharded(**options):
    return eqx.filter_jit(make)(MODEL_KEY, **options)


@functools.cache
def expected(tied):
    """Loss and gradients on one device without mesh and `shard_map`, by `jax.grad`."""

    def serial(model):
        total, count = loss_fn(model, make_batch(), jax.random.split(DROP_KEY, ROWS))
        return total / count

    return eqx.filter_jit(eqx.filter_value_and_grad(serial))(make_unsharded(tied=tied))


def largest_relative_difference(tree, reference):
    """Largest difference between two trees, relative to the largest value of each array."""
    pairs = zip(jax.tree.leaves(jax.device_get(reference)), jax.tree.leaves(jax.device_get(tree)), strict=True)
    return max(np.abs(a - b).max() / np.abs(a).max() for a, b in pairs)


@pytest.mark.parametrize("i", EACH_MESH)
def test_mesh_loss_and_gradients_equal_one_device(i):
    """All with dropout, packed sequences, GQA and uneven token counts; tied heads, micro-batches and remat in turn."""
    tied, remat = i % 2 == 0, ("none", "full", "dots", "elementwise")[i % 4]
    microbatches = 2 if i % 4 < 2 else 1
    mesh = zoo.make_mesh(**MESHES[i])
    model = zoo.place(make_unsharded(tied=tied, remat=remat), mesh)
    loss, grads = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches)(model, make_batch(), key=DROP_KEY)
    expected_loss, expected_grads = expected(tied)
    assert abs(loss - expected_loss) < 1e-5 * abs(expected_loss)
    assert largest_relative_difference(grads, expected_grads) < 2e-5
    for grad, parameter in zip(jax.tree.leaves(grads), jax.tree.leaves(zoo.trainable(model)), strict=True):
        assert grad.sharding.is_equivalent_to(parameter.sharding, grad.ndim)


def preference_loss(model, batch, key=None):
    """Direct preference optimization (arXiv:2305.18290, equation 7) without a reference: two calls of the model, one
    inside `jax.checkpoint`, one inside `jax.jit`."""

    def score(model, rows):
        losses = zoo.models.token_losses(model(rows["tokens"]), rows["targets"])
        return -zoo.parallel.reduce(losses.sum(1), over="seq")

    margin = eqx.filter_checkpoint(score)(model, batch["chosen"]) - eqx.filter_jit(score)(model, batch["rejected"])
    return -jax.nn.log_sigmoid(margin).sum(), jnp.float32(len(margin))


@pytest.mark.slow
def test_mesh_loss_that_calls_the_model_twice_and_transformed():
    model = make_unsharded(layers=1, windows=(None,), dropout=0.0)
    text = jax.random.randint(DATA_KEY, (2, 8, SEQ + 1), 0, VOCAB)
    chosen, rejected = ({"tokens": x[:, :-1], "targets": x[:, 1:]} for x in text)
    batch = {"chosen": chosen, "rejected": rejected}

    def serial(model):
        total, count = preference_loss(model, batch)
        return total / count

    expected_loss, expected_grads = eqx.filter_jit(eqx.filter_value_and_grad(serial))(model)
    mesh = zoo.make_mesh(data=1, fsdp=2, context=2, tensor=2)
    loss, grads = zoo.value_and_grad(preference_loss, mesh)(zoo.place(model, mesh), batch)
    assert abs(loss - expected_loss) < 1e-5 * abs(expected_loss)
    assert largest_relative_difference(grads, expected_grads) < 2e-5


@pytest.mark.slow
def test_mesh_with_uneven_vocabulary_and_bfloat16():
    """An uneven vocabulary is replicated; bfloat16 results on a mesh agree to the precision of bfloat16."""

    def rounded(model, batch, key=None):
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(zoo.trainable(model)))
        return loss_fn(zoo.cast(model, jnp.bfloat16), batch, key)

    def sized(key):
        return zoo.models.Transformer(vocab=97, embed=32, layers=2, heads=4, mlp=64, key=key)

    results = []
    for sizes, devices in (({}, 1), ({"fsdp": 2, "tensor": 2}, 8)):
        mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
        loss, grads = zoo.value_and_grad(rounded, mesh)(zoo.init(sized, MODEL_KEY, mesh), make_batch())
        assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
        results.append(jax.device_get((loss, grads)))
    (expected_loss, expected_grads), (loss, grads) = results
    assert abs(loss - expected_loss) < 2e-3
    assert largest_relative_difference(grads, expected_grads) < 0.03  # 8 bits of mantissa, summed in another order


@pytest.mark.slow
def test_mesh_dynamic_rope_uses_the_longest_row_of_the_batch():
    """One device has the long row; all devices scale RoPE by its length."""

    def sized(key):
        rotary = Rotary(8, scaling=DynamicScaling(4.0, original_length=4))
        return zoo.models.Transformer(vocab=16, embed=32, layers=1, heads=4, mlp=32, rotary=rotary, key=key)

    tokens = jax.random.randint(DATA_KEY, (8, SEQ), 0, 16)
    lengths = jnp.full((8, 1), 3).at[5].set(SEQ)
    segment_ids = (jnp.arange(SEQ) < lengths).astype(int) * (1 + jnp.arange(SEQ) // lengths)
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": segment_ids}
    batch |= {"positions": jnp.where(segment_ids > 0, jnp.arange(SEQ), 0), "weights": (segment_ids > 0).astype(float)}
    losses = []
    for devices in (1, 8):
        mesh = zoo.make_mesh(devices=jax.devices()[:devices])
        losses.append(float(zoo.value(loss_fn, mesh)(zoo.init(sized, MODEL_KEY, mesh), batch)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def recipe_step(mesh, traces):
    """Training step of a recipe with clipped AdamW on global arrays; appends to `traces` when traced."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1, mask=decay_mask))

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        traces.append(1)
        loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss

    model = zoo.init(lambda key: make(key, dropout=0.0, layers=2, windows=(5,)), MODEL_KEY, mesh)
    return step, model, zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)


def train(mesh, steps=10):
    """Return losses, number of traces, number of compilations, and arrays whose sharding changed."""
    traces = []
    step, model, opt_state = recipe_step(mesh, traces)
    before = [(x.ndim, x.sharding) for x in jax.tree.leaves((model, opt_state))]
    batch, losses = zoo.place_batch(make_batch(), mesh), []
    with compilations() as compiled:
        for _ in range(steps):
            model, opt_state, loss = step(batch, model, opt_state)
            losses.append(loss)
    after = [x.sharding for x in jax.tree.leaves((model, opt_state))]
    moved = [(old, new) for (ndim, old), new in zip(before, after, strict=True) if not new.is_equivalent_to(old, ndim)]
    return jax.device_get(jnp.stack(losses)), len(traces), len(compiled), moved


@contextlib.contextmanager
def compilations():
    """Yield a list that grows with every program compiled or fetched from the compilation cache."""
    found = []

    def listen(event, duration, **_):
        found.extend([event] * (event == "/jax/core/compile/backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        # parallel/test_gradient.py has the gradients of ZERO1, and test_zero1_shards_optimizer_state_and_gradients more
        pytest.param({"data": 2, "fsdp": 4, "layout": ZERO1}, marks=pytest.mark.slow),
    ],
    ids=lambda options: " ".join(options),
)
def test_mesh_ten_clipped_steps_equal_one_device_and_trace_once(options):
    expected_losses, *_ = train(zoo.make_mesh(devices=jax.devices()[:1]))
    assert expected_losses[0] - expected_losses[-1] > 1
    losses, traces, compiled, moved = train(zoo.make_mesh(**options))
    assert jnp.allclose(losses, expected_losses, rtol=1e-4)
    assert (traces, compiled, moved) == (1, 1, [])


def compiled(mesh, remat="none", **sizes):
    sizes = {"vocab": 512, "embed": 128, "layers": 6, "heads": 8, "mlp": 512} | sizes
    model = zoo.init(lambda key: zoo.models.Transformer(**sizes, remat=remat, key=key), MODEL_KEY, mesh)
    arrays, static = eqx.partition(model, eqx.is_array)
    batch = {"tokens": jnp.zeros((8, 8), int), "targets": jnp.zeros((8, 8), int)}
    step = jax.jit(lambda arrays, batch: zoo.value_and_grad(loss_fn, mesh)(eqx.combine(arrays, static), batch))
    return model, step.lower(arrays, batch).compile()


def collectives(step):
    """Count collectives by kind, including those combined into tuples."""
    kinds = r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
    return collections.Counter(re.findall(kinds, step.as_text()))


def test_zero3_gathers_each_parameter_and_never_the_model():
    """Eleven parameters: seven matrices and two norms of a block, embedding and final norm."""
    model, step = compiled(zoo.make_mesh(fsdp=8))
    size = sum(x.nbytes for x in jax.tree.leaves(model))
    assert step.memory_analysis().temp_size_in_bytes < size / 2
    moved = collectives(step)
    assert moved["all-gather"] <= 11 + 9 + 1, "all-gather each parameter once forward, a block's again backward"
    assert moved["reduce-scatter"] <= 11 + 1, "reduce-scatter each gradient once, that of a tied table twice"
    assert moved["all-reduce"] <= 1, "the loss and its count"
    assert set(moved) == {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.ci
def test_zero1_shards_optimizer_state_and_gradients():
    """No parameter is all-gathered for the passes, and each gradient is reduce-scattered once."""
    model, step = compiled(zoo.make_mesh(fsdp=8, layout=ZERO1))
    moved = collectives(step)
    assert set(moved) == {"reduce-scatter", "all-reduce"}
    assert moved["reduce-scatter"] <= 11
    grads = step.memory_analysis().output_size_in_bytes
    assert grads < sum(x.nbytes for x in jax.tree.leaves(model)) / 8 * 1.1


# inspect/test_program.py::test_donated_buffers_are_reused requires it by default
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"devices": 1}, {"devices": 8, "fsdp": 4, "tensor": 2}], ids=str)
def test_donated_step_updates_in_place(sizes):
    """Model and optimizer state are updated in the same memory: a failed donation would be silent."""
    mesh = zoo.make_mesh(**sizes | {"devices": jax.devices()[: sizes["devices"]]})
    step, model, opt_state = recipe_step(mesh, [])
    program = step.lower(zoo.place_batch(make_batch(), mesh), model, opt_state).compile()
    state_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((model, opt_state)))
    assert program.compiled.memory_analysis().alias_size_in_bytes >= state_bytes


@pytest.mark.slow  # inspect/test_program.py counts them
def test_data_parallel_all_reduces_gradients_outside_the_scan():
    _, step = compiled(zoo.make_mesh(data=8))
    moved = collectives(step)
    assert set(moved) == {"all-reduce"}
    assert moved["all-reduce"] <= 2, "one for all gradients, one for the loss and its count"
    assert not all_reduces_inside_loops(step)


@pytest.mark.slow  # inspect/test_program.py counts them
def test_tensor_parallel_all_reduces_twice_per_layer_and_pass():
    """Two sublayers contract a sharded dim forward, two backward. The sharded vocabulary is all-reduced in the
    embedding, in the loss (max, sum, target) and in the gradient of the head's input."""
    _, step = compiled(zoo.make_mesh(data=1, tensor=8))
    moved = collectives(step)
    assert set(moved) == {"all-reduce"}
    assert moved["all-reduce"] <= 4 + 5
    assert all_reduces_inside_loops(step), "those of the layers, which data parallelism must not have"


def all_reduces_inside_loops(step):
    """List the all-reduces inside a scan, by JAX's names of operations."""
    return [line for line in step.as_text().splitlines() if " all-reduce(" in line and "while/body" in line]


def test_bfloat16_gradients_are_reduced_in_float32():
    """All-gathers are in bfloat16, reduce-scatters and sums over tokens in float32, as the jaxpr shows."""

    def rounded(model, batch):
        return loss_fn(zoo.cast(model, jnp.bfloat16), batch)

    mesh = zoo.make_mesh(data=2, fsdp=4)
    model = zoo.place(eqx.filter_eval_shape(make, MODEL_KEY, dropout=0.0), mesh)
    program = str(jax.make_jaxpr(lambda m, b: zoo.value_and_grad(rounded, mesh)(m, b))(model, make_batch()))
    results = re.findall(r":(\w+)\[[^\]]*\]\S* = (all_gather|reduce_scatter|psum\w*)\[", program)
    kinds = collections.Counter((kind, dtype) for dtype, kind in results)
    assert kinds["all_gather", "bf16"] >= 16, kinds
    assert {dtype for kind, dtype in kinds if kind == "reduce_scatter"} == {"f32"}, kinds
    assert {dtype for kind, dtype in kinds if kind.startswith("psum")} == {"f32"}, kinds
