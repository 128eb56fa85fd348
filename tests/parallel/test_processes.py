"""Two processes of four devices give the loss, gradient and parameters of one process, each passing its own rows, or
the same where they share them; they resume from the same checkpoint, and agree that a folder is taken. `pipe` and
`context` may cross their border."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import make_environment


def run_worker(process, processes, port, folder):
    import jax

    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=process)
    run = train_across_processes if Path(folder).name == "axes" else train_and_resume
    results = run(process, processes, folder)
    print(json.dumps(results))


def train_and_resume(process, processes, folder):
    """Return what a process of so many computes, saves, and raises."""
    import jax

    import zoo

    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    make = lambda key: zoo.models.Transformer(vocab=16, embed=8, layers=1, heads=2, mlp=8, key=key)
    model = zoo.init(make, jax.random.key(0), mesh)
    rows = draw_rows(process, processes)
    batch = zoo.place_batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, mesh)
    assert batch["tokens"].shape == (4, 6)
    loss, grads = zoo.value_and_grad(lambda model, batch: zoo.cross_entropy(model, batch), mesh)(model, batch)
    norm = jax.jit(lambda grads: sum((g**2).sum() for g in jax.tree.leaves(grads)) ** 0.5)(grads)
    zoo.save(model, folder)
    again = zoo.load(folder, mesh=mesh)
    saved = zoo.value(lambda model, batch: zoo.cross_entropy(model, batch), mesh)(again, batch)
    results = {"loss": float(loss), "norm": float(norm), "saved": float(saved)}
    return results | share_and_resume(model, rows, folder)


def draw_rows(process, processes):
    """Return the rows of one of the processes."""
    import numpy as np

    rows = np.random.default_rng(0).integers(0, 16, (4, 7))
    return rows[process * 4 // processes : (process + 1) * 4 // processes]


def share_and_resume(model, rows, folder):
    """Return what is raised in all processes, what they read of shared rows, and the step that they resume from."""
    raised = [raise_on_first(function) for function in (lambda: b"\xff".decode(), lambda: {}["absent"])]
    return {"raised": raised} | place_shared_rows(rows) | resume_run(model, Path(folder) / "run")


def train_across_processes(process, processes, folder):
    """Return loss and norm of the gradient on meshes whose `pipe` (1F1B) or `context` (a ring) spans the processes;
    save the parameters of the latter, in which two processes agree on the rest too, and in two dtypes, sharded."""
    import jax

    import zoo
    from zoo.parallel import Schedule

    pipe, context = zoo.make_mesh(pipe=2, data=2, tensor=2), zoo.make_mesh(context=4, data=1, tensor=2)
    model = zoo.init(make_model, jax.random.key(0), context)
    zoo.save(model, folder)
    sharded = zoo.init(make_model, jax.random.key(0), zoo.make_mesh(fsdp=8))
    zoo.save(zoo.cast(sharded, "bfloat16"), Path(folder) / "mixed", shard_bytes=1000)
    results = {
        "pipe": compute_loss_and_norm(pipe, microbatches=2, schedule=Schedule("1f1b")),
        "context": compute_loss_and_norm(context),
    }
    return results | share_and_resume(model, draw_rows(process, processes), folder)


def make_model(key):
    """Return a model of two layers."""
    import zoo

    return zoo.models.Transformer(vocab=16, embed=8, layers=2, heads=2, mlp=8, key=key)


def compute_loss_and_norm(mesh, **options):
    import jax
    import numpy as np

    import zoo

    rows = np.random.default_rng(1).integers(0, 16, (4, 9))
    norm = jax.jit(lambda grads: sum((g**2).sum() for g in jax.tree.leaves(grads)) ** 0.5)
    index, count = zoo.parallel.reader(mesh)
    own = rows.reshape(count, -1, 9)[index]
    batch = zoo.place_batch({"tokens": own[:, :-1], "targets": own[:, 1:]}, mesh)
    model = zoo.init(make_model, jax.random.key(0), mesh)
    gradient = zoo.value_and_grad(lambda model, batch: zoo.cross_entropy(model, batch), mesh, **options)
    loss, grads = gradient(model, batch)
    return [float(loss), float(norm(grads))]


def place_shared_rows(own_rows):
    """Place batches on meshes whose `tensor` or `context` spans the processes, which then read the same rows."""
    import jax
    import numpy as np

    import zoo
    from tests.parallel.any_mesh import make_any_mesh

    own, refused = {"tokens": own_rows}, ""
    try:
        zoo.place_batch(own, zoo.make_mesh(data=1, tensor=8))
    except ValueError as error:
        refused = str(error)
    whole, sums = np.arange(4 * 8).reshape(4, 8), []
    for sizes in ({"context": 4, "tensor": 2}, {"pipe": 2, "data": 2, "tensor": 2}, {"data": 4, "context": 2}):
        mesh = make_any_mesh(**sizes)
        index, count = zoo.parallel.reader(mesh)
        tokens = zoo.place_batch({"tokens": whole.reshape(count, -1, 8)[index]}, mesh)["tokens"]
        assert tokens.shape == (4, 8)
        assert all(np.array_equal(shard.data, whole[shard.index]) for shard in tokens.addressable_shards)
        sums.append([count, int(jax.jit(lambda x: (x * x).sum())(tokens))])
    return {"refused": refused, "sums": sums}


def raise_on_first(function):
    """Return the kinds of the exception that `function`, which the first process alone calls, raises in this one."""
    from zoo.train.processes import run_on_first

    try:
        run_on_first(function)
    except Exception as error:
        return [kind.__name__ for kind in (ValueError, LookupError) if isinstance(error, kind)]


class Batches:
    """Batches of nothing."""

    state = 0

    def __next__(self):
        return None

    def restore(self, state):
        pass


def resume_run(model, out):
    """Save a model after steps 1 and 2, damage the later checkpoint, and resume; meanwhile, start another run."""
    import jax
    from jax.experimental import multihost_utils

    from zoo import train

    def make_run(resume):
        return train.Run(train.RunOptions(out, resume=resume), config={})

    with make_run(False) as run:
        for _ in run.steps(Batches(), 2):
            run.save(model)
    if jax.process_index() == 0:
        with (out / "checkpoints" / "2" / "about" / "metadata").open("r+b") as file:
            file.write(b"[")
    multihost_utils.sync_global_devices("damaged")
    with make_run(True) as run:
        run.restore(model)
        try:
            make_run(True)
        except BlockingIOError as error:
            return {"step": run.step, "taken": str(error)}


def run_processes(folder, *flags):
    """Return what each of two processes of four devices prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = make_environment(4, *flags)
    words = [[sys.executable, __file__, str(i), "2", str(port), str(folder)] for i in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=environment, **pipes) for command in words]
    try:
        ended = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(printed.splitlines()[-1]) for printed, _ in ended]


def check_shared_and_resumed(results):
    """Check what two processes agree on."""
    assert results["step"] == 1 and "is in use by process" in results["taken"]
    assert results["raised"] == [["ValueError"], ["LookupError"]]
    assert results["refused"].startswith("processes 0 and 1 hold the same rows on tensor 8, and pass different ones")
    assert results["sums"] == [[1, 10416], [1, 10416], [2, 10416]]


# The next test and tests/train/test_moving_between_processes.py, where `fsdp` spans two processes, hold by default what
# this test has on one mesh, but for the same bytes.
@pytest.mark.slow
def test_two_processes_give_the_result_of_one(tmp_path):
    single = train_and_resume(0, 1, tmp_path / "one")
    first, second = run_processes(tmp_path / "two")
    assert first == second
    check_shared_and_resumed(first)
    assert single["step"] == 1 and single["raised"] == first["raised"] and single["sums"] == [[1, 10416]] * 3
    assert first["loss"] == pytest.approx(single["loss"], rel=1e-6)
    assert first["norm"] == pytest.approx(single["norm"], rel=1e-5)
    assert first["saved"] == pytest.approx(single["loss"], rel=1e-6)
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert saved[0] == saved[1]


def test_pipe_and_context_cross_the_processes(tmp_path):
    import equinox as eqx
    import jax
    import numpy as np

    import zoo

    folder = tmp_path / "axes"
    expected = compute_loss_and_norm(zoo.make_mesh(devices=jax.devices()[:1]))
    first, second = run_processes(folder)
    assert first == second
    for axis in ("pipe", "context"):
        assert first[axis] == pytest.approx(expected, rel=1e-6)
    check_shared_and_resumed(first)
    model = eqx.filter_jit(make_model)(jax.random.key(0))
    for saved, made in zip(*map(jax.tree.leaves, (zoo.load(folder), model)), strict=True):
        np.testing.assert_allclose(saved, made, rtol=1e-5, atol=1e-6)  # another program
    mixed = zoo.load(folder / "mixed")
    assert {x.dtype.name for x in jax.tree.leaves(mixed)} == {"bfloat16", "float32"}
    for saved, made in zip(*map(jax.tree.leaves, (mixed, model)), strict=True):
        np.testing.assert_allclose(np.float32(saved), made, rtol=2**-7, atol=1e-6)


if __name__ == "__main__":
    run_worker(*map(int, sys.argv[1:4]), sys.argv[4])
