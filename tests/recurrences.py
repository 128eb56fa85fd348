"""Random operands of recurrences, and comparisons of their results."""

from functools import cache, partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from zoo.layers.recurrent.context import RecurrenceContext
from zoo.ops.recurrence.affine import mask_rows
from zoo.parallel.sequence import halo

BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 4, 3
CHANNELS = 3


def draw_delta(seq, decays, steps, seed, strength=1.0, dtype=jnp.float32):
    """Random operands: keys of length one, beta up to 2, half of the decays weak."""
    draw = np.random.default_rng(seed)
    normal = lambda *dims: draw.normal(size=(BATCH, *dims)).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    rows = (seq * steps, HEADS)
    write = unit(normal(*rows, KEY_DIM))
    inputs = {
        "query": normal(seq, HEADS, KEY_DIM),
        "read": -draw.uniform(0, 2, (BATCH, *rows, 1)).astype(np.float32) * write,
        "write": write,
        "write_value": normal(*rows, VALUE_DIM),
        "key": unit(normal(*rows, KEY_DIM)),
        "value": normal(*rows, VALUE_DIM),
        "state": normal(HEADS, KEY_DIM, VALUE_DIM),
    }
    inputs = {name: jnp.asarray(x, jnp.float32 if name == "state" else dtype) for name, x in inputs.items()}
    if decays != "none":
        dims = (seq, HEADS) if decays == "number" else (seq, HEADS, KEY_DIM)
        inputs["log_decay"] = -strength * jnp.abs(normal(*dims)) * draw.choice([0.01, 1], dims)
    return inputs


def all_close(found, expected, bound):
    """Assert equality up to `bound` times the largest magnitude of each array."""
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound * max(np.abs(theirs).max(), 1e-3))


def draw_gated(seq, kind, heads=2, groups=2, seed=0, strength=1.0):
    """Random query, key, value, log decay and state of gated linear attention; half of the decays are strong."""
    draw = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)
    shape = (BATCH, seq, heads, *((KEY_DIM,) if kind == "vector" else ()))
    decay = -jnp.abs(normal(*shape)) * jnp.asarray(draw.choice([0.01, strength], shape), jnp.float32)
    query, key = normal(BATCH, seq, groups, KEY_DIM), normal(BATCH, seq, groups, KEY_DIM)
    value, state = normal(BATCH, seq, heads, VALUE_DIM), normal(BATCH, heads, KEY_DIM, VALUE_DIM)
    return query, key, value, None if kind == "none" else decay, state


def draw_diagonal(seq, seed, *, segments=True, strength=1.0):
    """Random log decays, inputs, initial state and segment ids (a single segment without `segments`)."""
    draw = np.random.default_rng(seed)
    shape = (BATCH, seq, CHANNELS)
    ids = np.cumsum(draw.random((BATCH, seq)) < 0.15 * segments, axis=1)
    numbers = (-strength * draw.random(shape), draw.normal(size=shape), draw.normal(size=(BATCH, CHANNELS)))
    return *(jnp.asarray(x, jnp.float32) for x in numbers), jnp.asarray(ids, jnp.int32)


def far(a, b):
    """Return the largest difference relative to the largest magnitude of `b`."""
    return float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-3))


@partial(jax.jit, static_argnums=0)
def with_gradients(op, *arguments):
    """Return the outputs of an operation, and the gradients of their sum with fixed weights."""

    def loss(*arguments):
        results = op(*arguments)
        leaves = jax.tree.leaves(results)
        return sum((x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum() for x in leaves), results

    (_, results), gradients = jax.value_and_grad(loss, range(len(arguments)), has_aux=True)(*arguments)
    return results, gradients


def close(ours, theirs, tolerance=2e-6):
    """Assert equality of two trees, relative and absolute to the larger of one and the largest magnitude."""
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(other).max())))


def run_in_pieces(op, pieces, segment_ids):
    """Run `op` on the shards of a sequence as its devices would: the state before each is found from the maps of those
    before, composed from the last to the first."""
    maps, outputs, last = [], [], None
    for number, (piece, ids) in enumerate(zip(pieces, segment_ids, strict=True)):
        fresh = jnp.full(len(ids), True) if number == 0 else ids[:, 0] != segment_ids[number - 1][:, -1]

        def find_state(affine_map, fresh=fresh):
            earlier = reduce(lambda later, one: one.then(later), reversed(maps)) if maps else affine_map
            maps.append(affine_map.reset(fresh))
            return mask_rows(earlier.offset, fresh)

        output, last = op(piece, ids, find_state)
        outputs.append(output)
    return jnp.concatenate(outputs, axis=1), last


def draw_documents(seq, seed, *, packed=True):
    """Segment ids of rows with documents of any length, the last of them padding, or of rows of one document."""
    draw = np.random.default_rng(seed)
    ids = 1 + np.cumsum(draw.random((BATCH, seq)) < 0.1 * packed, axis=1)
    lengths = np.where(packed, draw.integers(1, seq + 1, (BATCH, 1)), seq)
    return jnp.asarray(ids * (np.arange(seq) < lengths), jnp.int32)


def assert_shards_equal_one_device(op, tokens, fixed, ids, tolerance=1e-5):
    """Compare outputs, last state and gradients of `op(tokens, fixed, ids, state, fresh)`, on one device and with the
    sequence on eight. `fresh` is None on one device."""
    whole, sharded = _compile_on_devices(op)
    ours, theirs = sharded(tokens, fixed, ids), whole(tokens, fixed, ids)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(ours))
    close(ours, theirs, tolerance)


@cache
def _compile_on_devices(op):
    """Jit an operation with its gradients, on one device and on eight."""
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    tokens_spec = P(None, "context")

    def on_shard(tokens, fixed, ids):
        begins = halo(ids, 1, ("context",))[:, 0] != ids[:, 0]
        fresh = begins | (jax.lax.axis_index("context") == 0)
        context = RecurrenceContext("auto", ids, None, fresh, ("context",))
        outputs, last = op(tokens, fixed, ids, context.incoming_state, fresh)
        return outputs, jax.tree.map(lambda x: x[None], last)

    specs = {"in_specs": (tokens_spec, P(), tokens_spec), "out_specs": (tokens_spec, P("context"))}
    on_shards = jax.shard_map(on_shard, mesh=mesh, **specs)

    def on_mesh(*arguments):
        outputs, last = on_shards(*arguments)
        return outputs, jax.tree.map(lambda x: x[-1], last)

    def compile_with_gradients(run):
        return jax.jit(lambda tokens, fixed, ids: with_gradients(lambda *x: run(*x, ids), tokens, fixed))

    return compile_with_gradients(lambda *x: op(*x, None, None)), compile_with_gradients(on_mesh)
