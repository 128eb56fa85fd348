"""Every pair of axes, four axes and all six: equal to one device, or compiled for devices that are not here."""

import itertools
import os
import subprocess
import sys

import equinox as eqx
import jax
import pytest

import zoo
from tests.aot import imagine
from tests.parallel.any_mesh import make_any_mesh
from tests.parallel.pipeline_problem import SEQ, assert_equal_to_one_device, loss_fn, make_hybrid
from zoo.parallel import ZERO2
from zoo.parallel.layout import AXES
from zoo.parallel.schedule import Schedule


def check(**sizes):
    """Compare the model of a delta rule, attention and experts, under 1F1B where there are stages."""
    options = {"microbatches": 2, "schedule": Schedule("1f1b")} if "pipe" in sizes else {}
    assert_equal_to_one_device(make_hybrid, make_any_mesh(**sizes), **options)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*itertools.combinations(AXES, 2)], ids=" x ".join)
def test_every_pair_of_axes_equals_one_device(pair):
    check(**dict.fromkeys(pair, 2))


@pytest.mark.slow
def test_four_axes_equal_one_device():
    """In a process of its own, which has 16 devices."""
    code = "from tests.parallel.test_all_axes import check; check(data=2, expert=2, context=2, tensor=2)"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=16")
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"XLA_FLAGS": flags}, check=True)


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5p:4x4x4", "h100:8x8"])
def test_six_axes_compile_for_64_devices(topology):
    """1F1B, ZeRO-2, an exchange of tokens, a ring of keys and tensor parallelism in one program, none of them lost."""
    mesh = zoo.make_mesh(**dict.fromkeys(AXES, 2), devices=imagine(topology), layout=ZERO2)
    model = zoo.place(eqx.filter_eval_shape(make_hybrid, jax.random.key(0)), mesh)
    shape = jax.ShapeDtypeStruct((32, SEQ), "int32")
    batch = zoo.place_batch({"tokens": shape, "targets": shape}, mesh)
    run = zoo.value_and_grad(loss_fn, mesh, has_aux=True, microbatches=4, schedule=Schedule("1f1b"))
    program = zoo.inspect.compiled(eqx.filter_jit(lambda *args: run(*args)), model, batch)
    used = {(row.kind, axis) for row in program.collectives for axis in row.axes}
    permuted = {("collective-permute", "pipe"), ("collective-permute", "context")}
    summed = {("all-reduce", "data"), ("reduce-scatter", "fsdp"), ("all-reduce", "tensor")}
    assert used >= permuted | summed
    assert {kind for kind, axis in used if axis == "expert"} & {"all-to-all", "all-gather"}
