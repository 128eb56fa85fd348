"""Fingerprints of frozen parameters: independent of the mesh, sensitive to values, checked on resume."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import Layout, adapters, train
from zoo.parallel import leaves
from zoo.parallel.fingerprint import fingerprint, fingerprint_arrays, hash_array
from zoo.parallel.rounds import has_rounds

SIZES = {"vocab": 64, "embed": 32, "layers": 2, "heads": 4, "mlp": 64}


@pytest.fixture(scope="module")
def base():
    return zoo.models.Transformer(**SIZES, key=jax.random.key(0))


@pytest.fixture(scope="module")
def tuned(base):
    return adapters.lora(base, rank=2, key=jax.random.key(1))


def query(model):
    return model.stack.segments[0].blocks[0].mixer.query


@pytest.mark.slow
def test_fingerprint_is_the_same_on_any_mesh(base, tuned):
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    for model in (base, tuned):
        assert fingerprint(zoo.place(model, mesh)) == fingerprint(model)
    assert len(fingerprint(tuned)) == 64


@pytest.mark.slow
def test_fingerprint_does_not_depend_on_rounds():
    four = zoo.models.Transformer(**SIZES | {"layers": 4}, key=jax.random.key(0))
    mesh = zoo.make_mesh(data=1, pipe=2, tensor=4, layout=Layout(rounds=2))
    assert fingerprint_arrays(zoo.place(four, mesh)) == fingerprint_arrays(four)


@pytest.mark.parametrize("rounds", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fingerprint_gathers_no_array(base, rounds):
    sizes = {"data": 2} if rounds == 1 else {"data": 1, "pipe": 1, "context": 2}
    placed = zoo.place(base, zoo.make_mesh(**sizes, fsdp=2, tensor=2, layout=Layout(rounds=rounds)))
    for leaf, x in zip(leaves(placed), jax.tree.leaves(placed), strict=True):
        hash_one = partial(hash_array, in_rounds=has_rounds(leaf))
        found = zoo.inspect.compiled(hash_one, x).collectives
        assert {one.kind for one in found} <= {"all-reduce"}
        assert sum(one.bytes for one in found) <= 16, "two words, there and back"


def test_fingerprint_excludes_adapter_parameters(base, tuned):
    again = adapters.lora(base, rank=2, key=jax.random.key(2))
    assert fingerprint(again) == fingerprint(tuned)
    assert not [name for name in fingerprint_arrays(tuned) if name.endswith(("query.down.weight", "query.up.weight"))]
    assert [name for name in fingerprint_arrays(tuned) if name.endswith(("query.scale", "query.rank"))]
    assert len(fingerprint_arrays(base)) == len(jax.tree.leaves(base)) > 0


def changed(model, change):
    return eqx.tree_at(lambda model: query(model).base.weight, model, replace_fn=change)


CHANGES = {
    "one number, by a bit": lambda x: x.at[1, 3, 5].set(jnp.nextafter(x[1, 3, 5], jnp.inf)),
    "the sign of a zero": lambda x: x.at[0, 0, 0].set(-0.0),
    "two numbers exchanged": lambda x: x.at[0, 3, 5].set(x[0, 5, 3]).at[0, 5, 3].set(x[0, 3, 5]),
    "two rows exchanged": lambda x: x[:, np.r_[1, 0, 2 : x.shape[1]]],
    "two layers exchanged": lambda x: x[::-1],
    "turned": lambda x: x.swapaxes(-1, -2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_fingerprint_detects_changed_values(tuned, change):
    at_zero = changed(tuned, lambda x: x.at[0, 0, 0].set(0.0))
    before, after = fingerprint_arrays(at_zero), fingerprint_arrays(changed(at_zero, change))
    assert [name for name in before if before[name] != after[name]] == [
        "stack.segments.0.blocks.0.mixer.query.base.weight"
    ]
    parts = [one["stack.segments.0.blocks.0.mixer.query.base.weight"].split()[-2:] for one in (before, after)]
    assert parts[0][0] != parts[1][0] and parts[0][1] != parts[1][1], "each of the two sums sees it"


def test_fingerprint_detects_alpha_dtype_and_position(base, tuned):
    found = {
        *map(fingerprint, (base, tuned, zoo.cast(base, "bfloat16"))),
        fingerprint(adapters.lora(base, rank=2, alpha=8, key=jax.random.key(1))),
        fingerprint(adapters.lora(base, rank=2, rank_pattern={"layers.0.*": 1}, key=jax.random.key(1))),
        fingerprint({"a": jnp.arange(3), "b": jnp.arange(4)}),
        fingerprint({"a": jnp.arange(4), "b": jnp.arange(3)}),
    }
    assert len(found) == 7


def test_fingerprint_of_any_dtype():
    def tree(shift):
        bits = jnp.asarray([1, 0, 1, 0]) + shift
        kinds = ("bool", "int4", "uint8", "int16", "bfloat16", "float8_e4m3fn", "float16", "float32", "complex64")
        return {kind: (bits % 2).astype(kind) for kind in kinds} | {"key": jax.random.key(shift), "empty": bits[:0]}

    one, other, again = fingerprint_arrays(tree(0)), fingerprint_arrays(tree(1)), fingerprint_arrays(tree(0))
    assert one == again
    assert {name for name in one if one[name] == other[name]} == {"empty"}
    assert fingerprint_arrays(None) == {}


OPTIMIZER = optax.adam(1e-2)


def work(out, model, *, steps=2, resume=False, whole=False):
    """Run a few steps on the trainable parameters; save these, or with `whole` the full model for comparison."""
    held = zoo.trainable(model) if not whole else model
    state = held, OPTIMIZER.init(zoo.trainable(model))
    frozen = None if whole else model
    with train.Run(train.RunOptions(out, resume=resume), config={}, frozen=frozen) as run:
        batches = train.ShuffledBatches([{"tokens": np.zeros(4, np.int32)}] * 8, 4)
        held, moments = run.restore(state, batches)
        for _ in run.steps(batches, steps):
            held = jax.tree.map(lambda x: x + run.step if eqx.is_inexact_array(x) else x, held)
            run.log(step_size=run.step)
            run.save((held, moments), batches)
        batches.close()
    return eqx.combine(held, model)


def bytes_below(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_checkpoint_holds_trainable_parameters_only(tuned, tmp_path):
    work(tmp_path / "run", tuned, steps=2)
    again = work(tmp_path / "run", tuned, steps=3, resume=True)
    unbroken = work(tmp_path / "unbroken", tuned, steps=3)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(unbroken)))
    assert np.array_equal(query(again).down.weight, query(tuned).down.weight + 1 + 2 + 3)
    work(tmp_path / "whole", tuned, whole=True)
    small, large = (bytes_below(tmp_path / name / "checkpoints" / "2" / "state") for name in ("unbroken", "whole"))
    trainable_bytes = 3 * 4 * zoo.count(tuned)  # with two moments, in float32
    base = sum(x.nbytes for x in jax.tree.leaves(tuned)) - 4 * zoo.count(tuned)
    assert small < large - 0.7 * base and small < 3 * trainable_bytes


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda base: adapters.lora(base, rank=2, alpha=4, key=jax.random.key(1)), "query.scale: the numbers differ"),
        (
            lambda base: adapters.lora(zoo.cast(base, "bfloat16"), rank=2, key=jax.random.key(1)),
            r"embedding.weight: float32 \[64, 32\] in the checkpoint, bfloat16 \[64, 32\] here",
        ),
        (lambda base: adapters.lora(base, targets="key", rank=2, key=jax.random.key(1)), "absent here"),
    ],
    ids=["another alpha", "another dtype", "another target"],
)
def test_checkpoint_refuses_another_base_model(base, tuned, other, said, tmp_path):
    work(tmp_path, tuned)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "env.json"}
    with pytest.raises(ValueError, match=f"(?s)on top of other parameters.*{said}.*Start from the model"):
        work(tmp_path, other(base), resume=True)
    with pytest.raises(ValueError, match="on top of other parameters"):
        work(tmp_path, tuned, resume=True, whole=True)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "env.json"}
    assert after == before


def test_fingerprint_covers_all_of_a_frozen_teacher(base, tmp_path):
    state = jnp.zeros(3)
    with train.Checkpoints(tmp_path, frozen=base) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.restore(state)
    moved = eqx.tree_at(lambda model: model.embedding.weight, base, replace_fn=lambda x: x + 1e-3)
    with (
        train.Checkpoints(tmp_path, frozen=moved) as checkpoints,
        pytest.raises(ValueError, match="embedding.weight: the numbers differ"),
    ):
        checkpoints.restore(state)


def test_statistics_are_no_part_of_a_frozen_model():
    """Histories of delayed FP8 scaling under an adapter change in every step."""
    model = zoo.models.Transformer(vocab=8, embed=8, layers=1, heads=1, mlp=8, key=jax.random.key(0))
    low = zoo.precision.fp8(model, zoo.precision.DelayedScaling(history=4))
    moved = jax.tree.map(lambda leaf: leaf + 1 if leaf.shape[-1:] == (4,) else leaf, low)
    assert fingerprint(low) == fingerprint(moved) == fingerprint(model)
