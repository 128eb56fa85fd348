"""DiLoCo's steps against synchronous training and the paper's loop, what they send; the recipe, stopped and resumed."""

import os
import shutil
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from recipes import diloco
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train
from zoo.layers import MLP

MESHES = [
    {"data": 1},
    {"data": 4},
    pytest.param({"data": 2, "tensor": 2}, id="two workers on each of two pairs of devices"),
]
WORKERS = 4
TINY = {
    "workers": 4, "tensor": 2, "periods": (2,), "pretrain_steps": 2, "embed": 16, "layers": 1, "heads": 2,
    "mlp_dim": 16, "seq_len": 16, "batch_size": 8, "steps": 4, "warmup_steps": 1, "eval_every": 4,
}  # fmt: skip


def make_mesh(sizes):
    return diloco.shard_workers(zoo.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))]))


def make_model(mesh):
    return zoo.init(lambda key: MLP(8, 16, bias=True, key=key), jax.random.key(0), mesh)


def squared_error(model, batch):
    outputs, _ = model(batch["inputs"])
    return ((outputs - batch["outputs"]) ** 2).sum(), batch["inputs"].shape[0]


def make_batches(count):
    draw = np.random.default_rng(0).normal
    return [{name: draw(size=(8, 8)).astype(np.float32) for name in ("inputs", "outputs")} for _ in range(count)]


def start_diloco(mesh, optimizer, outer):
    """Return the steps of DiLoCo, and the state: workers, inner state, model, outer state."""
    model = make_model(mesh)
    workers = diloco.replicate(model, WORKERS, mesh)
    opt_state = zoo.place(optimizer.init(zoo.trainable(workers)), mesh.optimizer)
    outer_state = zoo.place(outer.init(zoo.trainable(model)), mesh.optimizer)
    steps = diloco.make_inner_step(squared_error, optimizer, mesh), diloco.make_outer_step(outer, WORKERS, mesh)
    return *steps, (workers, opt_state, model, outer_state)


def run_diloco(mesh, optimizer, outer, period, batches):
    inner_step, outer_step, (workers, opt_state, model, outer_state) = start_diloco(mesh, optimizer, outer)
    for number, batch in enumerate(batches, 1):
        workers, opt_state, _ = inner_step(zoo.place_batch(batch, mesh), workers, opt_state)
        if number % period == 0:
            workers, model, outer_state, _ = outer_step(workers, model, outer_state)
    assert_equal(jax.tree.map(lambda x: x[-1], workers.replicas), model, tolerance=0)
    return model


def assert_equal(tree, expected, tolerance):
    for x, y in zip(*(jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in (tree, expected)), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=tolerance)


@pytest.mark.parametrize("sizes", MESHES)
def test_one_inner_step_of_sgd_is_synchronous_sgd(sizes):
    mesh = make_mesh(sizes)
    batches = make_batches(4)
    found = run_diloco(mesh, optax.sgd(0.01), optax.sgd(1.0), 1, batches)
    model = make_model(mesh)
    opt_state = optax.sgd(0.01).init(zoo.trainable(model))
    sync_step = diloco.make_sync_step(squared_error, optax.sgd(0.01), mesh)
    for batch in batches:
        model, opt_state, _ = sync_step(zoo.place_batch(batch, mesh), model, opt_state)
    assert_equal(found, model, 1e-6)


@pytest.mark.parametrize("sizes", MESHES)
def test_diloco_is_the_loop_of_the_paper(sizes):
    """Algorithm 1, a worker after the other on one device: AdamW with clipping, then Nesterov's momentum by hand."""
    mesh = make_mesh(sizes)
    config = diloco.Config()
    batches = make_batches(6)
    schedule = optax.constant_schedule(1e-2)
    optimizer = diloco.make_optimizer(config, schedule, diloco.clip_each_worker(1.0))
    found = run_diloco(mesh, optimizer, diloco.make_outer_optimizer(config), 3, batches)

    shared = make_model(make_mesh({"data": 1}))
    ordinary = diloco.make_optimizer(config, schedule, optax.clip_by_global_norm(1.0))
    states = [ordinary.init(zoo.trainable(shared)) for _ in range(WORKERS)]
    momentum = jax.tree.map(jnp.zeros_like, shared)

    @jax.jit
    def inner_step(model, state, rows):
        grads = jax.grad(lambda model: squared_error(model, rows)[0] / len(rows["inputs"]))(model)
        updates, state = ordinary.update(grads, state, model)
        return optax.apply_updates(model, updates), state

    for first in (0, 3):
        replicas = [shared] * WORKERS
        for batch in batches[first : first + 3]:
            for worker in range(WORKERS):
                rows = {name: x[2 * worker : 2 * worker + 2] for name, x in batch.items()}
                replicas[worker], states[worker] = inner_step(replicas[worker], states[worker], rows)
        outer_grads = jax.tree.map(lambda old, *new: old - sum(new) / WORKERS, shared, *replicas)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, outer_grads)
        shared = jax.tree.map(lambda x, m, g: x - 0.7 * (0.9 * m + g), shared, momentum, outer_grads)
    assert_equal(found, shared, 1e-5)


@pytest.mark.parametrize("sizes", MESHES[1:])
def test_workers_send_nothing_but_their_average(sizes):
    mesh = make_mesh(sizes)
    optimizer = diloco.make_optimizer(diloco.Config(), optax.constant_schedule(1e-2), diloco.clip_each_worker(1.0))
    outer = diloco.make_outer_optimizer(diloco.Config())
    inner_step, outer_step, (workers, opt_state, model, outer_state) = start_diloco(mesh, optimizer, outer)
    (batch,) = make_batches(1)
    inner = zoo.inspect.compiled(inner_step, zoo.place_batch(batch, mesh), workers, opt_state).collectives
    assert {row.axes for row in inner} == ({("tensor",)} if "tensor" in sizes else set())
    sent = zoo.inspect.compiled(outer_step, workers, model, outer_state).collectives
    (average,) = [row for row in sent if row.axes == ("data",)]
    shards = [x.addressable_shards[0].data.size for x in jax.tree.leaves(zoo.trainable(model))]
    assert (average.kind, average.bytes) == ("all-reduce", 4 * sum(shards))
    assert {row.axes for row in sent} <= {("data",), ("tensor",)}


@pytest.mark.ci
def test_workers_send_nothing_while_they_train_a_transformer():
    mesh = make_mesh({"data": 4})
    config = diloco.Config(layers=1)
    model = zoo.init(lambda key: diloco.make_model(config, 256, key), jax.random.key(0), mesh)
    workers = diloco.replicate(model, WORKERS, mesh)
    optimizer = diloco.make_optimizer(config, optax.constant_schedule(1e-2), diloco.clip_each_worker(1.0))
    opt_state = zoo.place(optimizer.init(zoo.trainable(workers)), mesh.optimizer)
    inner_step = diloco.make_inner_step(zoo.cross_entropy, optimizer, mesh)
    program = zoo.inspect.compiled(inner_step, config.make_abstract_batch(mesh), workers, opt_state)
    assert program.collectives == ()


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(diloco.main, data=(text,), out=out, **TINY)
    return out


@pytest.mark.ci
def test_diloco_runs_and_their_report(unbroken):
    runs = {name: train.read_metrics(unbroken / name / "metrics.jsonl") for name in ("pretrain", "sync", "h2")}
    check_optimization(unbroken, "sync", "h2")
    assert [line["step"] for line in runs["h2"] if "outer_gradient_norm" in line] == [2, 4]
    assert all(np.shape(line["losses"]) == (4,) for line in runs["h2"])
    # All start from the pretrained model, and read the same rows.
    assert np.mean(runs["h2"][0]["losses"]) == pytest.approx(runs["sync"][0]["loss"], abs=1e-5)
    assert runs["sync"][0]["loss"] < runs["pretrain"][0]["loss"]
    config = diloco.Config(embed=16, layers=1, heads=2, mlp_dim=16)
    parameters = zoo.count(diloco.make_model(config, 256, jax.random.key(0)))
    message = 2 * (4 - 1) / 4 * 4 * parameters
    last = {name: lines[-1]["bytes_sent"] for name, lines in runs.items()}
    assert last == {"pretrain": 2 * message, "sync": 4 * message, "h2": 2 * message}
    report = (unbroken / "report.html").read_text()
    for part in ("MB sent", "bytes sent by each worker", "Held-out loss against communication", ">h2</text>"):
        assert part in report
    assert "http" not in report


@pytest.mark.ci
def test_diloco_resumes_between_outer_steps(text, unbroken, tmp_path, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out, ignore=shutil.ignore_patterns("h2", "report.html"))
    log = train.Run.log

    def struck(run, **values):
        if (run.name, run.step) == ("h2", 2):  # it stops after step 3 of 4, with outer steps after 2 and 4
            os.kill(os.getpid(), signal.SIGTERM)
        log(run, **values)

    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "log", struck)
        call(diloco.main, data=(text,), out=out, resume=True, **TINY)
    assert len(train.read_metrics(out / "h2" / "metrics.jsonl")) == 3 and not (out / "report.html").exists()
    call(diloco.main, data=(text,), out=out, resume=True, **TINY)
    for name in ("sync", "h2"):
        path = f"{name}/metrics.jsonl"
        assert (out / path).read_bytes() == (unbroken / path).read_bytes()
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_diloco_starts_from_a_checkpoint(text, start, tmp_path):
    call(
        diloco.main,
        data=(text,),
        out=tmp_path / "run",
        start=start,
        **TINY | {"tensor": 1, "workers": 8, "dtype": "bfloat16", "steps": 2},
    )
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"sync", "report.html"}
    assert not (tmp_path / "run" / "pretrain").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 6}, "--workers 6: expected 2 or more, a multiple of the 4 data devices"),
        ({"workers": 1, "tensor": 8}, "--workers 1: expected 2 or more"),
        ({"batch_size": 10}, "--batch-size 10 does not divide over --workers 4"),
        ({"periods": (2, 3)}, "--periods 3: expected a divisor of --steps 4"),
        ({"fsdp": 2}, "a worker of this recipe has one device, or several of --tensor: --fsdp is not supported"),
        ({"context": 2, "pipe": 2}, "--context, --pipe is not supported"),
        ({"expert": 2, "microbatches": 2}, "--expert, --microbatches is not supported"),
        ({"sequence_parallel": True}, "--sequence-parallel is not supported"),
    ],
)
def test_diloco_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(diloco.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
