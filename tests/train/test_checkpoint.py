"""Checkpoints: exact restoration on any mesh, donation, damaged and mismatched checkpoints."""

import errno
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import zoo
from zoo import Layout
from zoo.train import Checkpoints, checkpoint
from zoo.train.array_names import describe_arrays, flatten_with_names
from zoo.train.checkpoint import diff_configs

OPTIMIZER = optax.adamw(1e-3)


def make_state(width: int = 16, seed: int = 0):
    """A module with static parts, an optimizer's state, a typed key, bfloat16, a scalar and an empty array."""
    key, model_key = jr.split(jr.key(seed))
    model = eqx.nn.MLP(8, 8, width, 2, key=model_key)
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    loose = dict(key=key, half=jnp.full((8,), seed, jnp.bfloat16), empty=jnp.zeros((0, 3)))
    return dict(model=model, optimizer=opt_state, **loose)


def on(devices: int, tree):
    """`tree` with matrices split over so many devices, all else whole on each."""
    mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))

    def put(x):
        if not eqx.is_array(x):
            return x
        spec = PartitionSpec("fsdp") if x.ndim == 2 and x.size else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


def numbers(tree):
    data = lambda x: jr.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(data(x)).astype(np.float64) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(numbers(a), numbers(b), strict=True))


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as opened:
        yield opened


def reopened(checkpoints: Checkpoints) -> Checkpoints:
    checkpoints.wait()
    return Checkpoints(checkpoints.directory)


@pytest.mark.one_case
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow), 8])
def test_checkpoint_restores_exactly_on_another_sharding(checkpoints, devices):
    state = on(8, make_state(seed=3))
    checkpoints.save(7, state, data={"windows": 56}, config={"embed": 16, "data": (Path("a"),)}, metric=2.5)
    like = on(devices, make_state(seed=4))
    step, back, data, config = checkpoints.restore(like)
    assert (step, data, config) == (7, {"windows": 56}, {"embed": 16, "data": ["a"]})
    assert same(back, state) and back["model"].activation is like["model"].activation
    for new, old in zip(jax.tree.leaves(back), jax.tree.leaves(like), strict=True):
        if eqx.is_array(new):
            assert new.sharding == old.sharding and new.dtype == old.dtype


def make_layers(seed=0):
    model = zoo.models.Transformer(vocab=16, embed=8, layers=8, heads=2, mlp=8, key=jr.key(seed))
    return {"model": model, "optimizer": OPTIMIZER.init(zoo.trainable(model))}


def place_layers(state, rounds, sizes):
    mesh = zoo.make_mesh(
        **{"data": 1} | sizes, devices=jax.devices()[: math.prod(sizes.values())], layout=Layout(rounds=rounds)
    )
    return zoo.place(state, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [(1, {"fsdp": 2}), (2, {"pipe": 2, "fsdp": 2, "tensor": 2})],
)
def test_checkpoint_restores_in_the_rounds_of_any_mesh(checkpoints, first):
    """Saved in rounds or not: restored by meshes with and without pipe, in turn, from arrays or from shapes."""
    saved, whole, other = place_layers(make_layers(), *first), make_layers(), make_layers(seed=1)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    checkpoints.save(1, saved)
    expected = [(1, {}), (1, {"pipe": 2}), (4, {"pipe": 2, "tensor": 2}), (2, {"pipe": 4, "fsdp": 2}), (2, {})]
    for step, (rounds, sizes) in enumerate(expected, start=2):
        like = place_layers(other, rounds, sizes)
        state = checkpoints.restore(jax.tree.map(shape, like) if step % 2 else like).state
        assert jax.tree.structure(state) == jax.tree.structure(like)
        for x, y, z in zip(*map(jax.tree.leaves, (state, like, place_layers(whole, rounds, sizes))), strict=True):
            assert x.shape == y.shape and x.sharding == y.sharding and np.array_equal(x, z)
        checkpoints.save(step, state)
    checkpoints.wait()
    leaves = json.loads((checkpoints.directory / "6" / "about" / "metadata").read_text())["leaves"]
    assert leaves == describe_arrays(flatten_with_names(whole))


def test_checkpoint_in_rounds_names_the_stored_shapes(checkpoints):
    checkpoints.save(1, {"model": make_layers()["model"]})
    wider = zoo.models.Transformer(vocab=16, embed=16, layers=8, heads=2, mlp=8, key=jr.key(0))
    with pytest.raises(ValueError, match=r"float32 \[8, 8, 8\] in the checkpoint, float32 \[8, 8, 16\] here"):
        checkpoints.restore({"model": place_layers(wider, 2, {"pipe": 2})})


def test_checkpoint_restored_rounds_can_be_donated(checkpoints):
    state = place_layers(make_layers(), 2, {"pipe": 2, "tensor": 2})
    checkpoints.save(1, state)
    restored = checkpoints.restore(state).state
    jax.jit(lambda x: jax.tree.map(lambda x: x + 1, x), donate_argnums=0)(restored)
    assert all(x.is_deleted() for x in jax.tree.leaves(restored))


def test_checkpoint_restores_from_shapes(checkpoints):
    state = on(8, make_state(seed=1))
    checkpoints.save(1, state)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if eqx.is_array(x) else x
    assert same(checkpoints.restore(jax.tree.map(shape, state)).state, state)


@pytest.mark.parametrize("devices", [1, 8])
def test_checkpoint_restored_arrays_can_be_donated(checkpoints, devices):
    state = on(devices, {"weight": jnp.arange(4096.0).reshape(64, 64)})
    checkpoints.save(1, state)
    weight = checkpoints.restore(state).state["weight"]
    places = lambda x: [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
    before = places(weight)
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(weight)
    assert weight.is_deleted() and places(after) == before


def test_checkpoint_saved_arrays_can_be_donated_at_once(checkpoints):
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    state = on(8, {"weight": jnp.arange(2.0**20).reshape(1024, 1024)})
    wanted = numbers(state)[0]
    checkpoints.save(1, state)
    jax.block_until_ready(step(state["weight"]))
    assert np.array_equal(numbers(checkpoints.restore(on(8, {"weight": jnp.zeros((1024, 1024))})).state)[0], wanted)


def test_checkpoint_of_small_replicated_arrays_compiles_nothing(checkpoints):
    """Orbax by itself has each replica write a slice, each of which is a program."""
    spec = NamedSharding(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec())
    state = {f"{n}": jax.device_put(np.full((8, 24 + n), n, np.float32), spec) for n in range(4)}
    compiled = []
    listen = lambda name, _, **details: compiled.append(details) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        checkpoints.save(1, state)
        checkpoints.wait()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert same(checkpoints.restore(state).state, state)


def test_checkpoint_keeps_the_highest(tmp_path):
    with Checkpoints(tmp_path, keep_last=1, keep_best=2, best="highest") as checkpoints:
        for step, metric in enumerate([2.0, -1.0, 5.0, 2.0, float("inf"), 0.0]):
            checkpoints.save(step, {"x": jnp.ones(3)}, metric=metric)
        assert checkpoints.restorable_steps() == [2, 3, 5]
    with pytest.raises(ValueError, match="best='largest': expected one of lowest, highest"):
        Checkpoints(tmp_path, best="largest")


def test_checkpoint_keeps_the_last_and_the_best(tmp_path):
    with Checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
        for step, metric in enumerate([5.0, 1.0, float("nan"), None, 3.0, 4.0]):
            checkpoints.save(step, {"x": jnp.ones(3)}, metric=metric)
        assert checkpoints.restorable_steps() == [1, 4, 5] and checkpoints.latest_step() == 5
        assert int(checkpoints.restore({"x": jnp.zeros(3)}, step=1).state["x"].sum()) == 3


def test_checkpoint_save_drops_later_steps(checkpoints):
    for step in (10, 20):
        checkpoints.save(step, {"x": jnp.full(3, step)})
    checkpoints.save(15, {"x": jnp.full(3, 15)})
    assert checkpoints.restorable_steps() == [10, 15]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.one_case
@pytest.mark.parametrize(
    "part", ["state/d/*", "state/manifest.ocdbt", "state/_METADATA", "about/metadata", "files.json"]
)
@pytest.mark.parametrize("damage", [truncate, Path.unlink, lambda path: path.write_bytes(b"")])
def test_checkpoint_skips_damaged_ones(tmp_path, caplog, part, damage):
    state = {"x": jnp.arange(5000.0)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    damage(next((tmp_path / "2").glob(part)))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1 and checkpoints.restore(state).step == 1
        assert [record.message for record in caplog.records if "passed over" in record.message] == [
            record.message for record in caplog.records if record.levelno >= logging.WARNING
        ]
        assert len(caplog.records) == 1 and str(tmp_path / "2") in caplog.text
        checkpoints.save(2, state)
        assert checkpoints.restorable_steps() == [1, 2]


def test_checkpoint_survives_a_kill_while_saving(tmp_path, caplog):
    """A process that dies by SIGKILL in the middle of a save leaves the checkpoint before."""
    program = f"""
        import os, jax.numpy as jnp
        from pathlib import Path
        from zoo.train import Checkpoints, checkpoint
        checkpoints = Checkpoints(Path({str(tmp_path)!r}))
        checkpoints.save(1, {{"x": jnp.ones(8)}})
        checkpoints.wait()
        checkpoints._finish_files = lambda: os.kill(os.getpid(), 9)
        checkpoints.save(2, {{"x": jnp.ones(8)}})
        checkpoints.wait()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(os.listdir(tmp_path)) == 2
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        assert [record.message for record in caplog.records] == [
            f"{tmp_path}/2.orbax-checkpoint-tmp: passed over, it was never finished"
        ]
        checkpoints.save(3, {"x": jnp.ones(8)})
        assert checkpoints.restorable_steps() == [1, 3] and sorted(os.listdir(tmp_path)) == ["1", "3"]


def run_to_its_end(tmp_path, ending, *, fails=False):
    """Run a program that begins a save in a function, and ends."""
    program = f"""
        import errno, sys, time, jax.numpy as jnp
        from zoo.train import Checkpoints, checkpoint_folder
        written = checkpoint_folder.write_manifest
        def write(folder, metric):
            time.sleep(0.5)
            if {fails}:
                raise OSError(errno.ENOSPC, "No space left on device")
            written(folder, metric)
        checkpoint_folder.write_manifest = write
        def train():
            Checkpoints({str(tmp_path)!r}).save(7, {{"x": jnp.ones(8)}})
            {ending}
        train()
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("ending", "status"),
    [("raise KeyError('mine')", 1), ("pass", 0), ("sys.exit(3)", 3)],
)
@pytest.mark.one_case
def test_save_under_way_is_finished_at_the_end_of_a_program(tmp_path, ending, status):
    done = run_to_its_end(tmp_path, ending)
    assert done.returncode == status and done.stderr.count("Error") == (status == 1), done.stderr
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 7


def test_checkpoint_that_fails_as_the_program_ends_is_named(tmp_path):
    done = run_to_its_end(tmp_path, "pass", fails=True)
    assert f"error: {tmp_path}: the checkpoint of step 7 was not written (no space was left" in done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_checkpoint_wait_that_is_interrupted_can_be_repeated(checkpoints, monkeypatch):
    resumed = threading.Event()

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_finish_files", resumed.wait)
    checkpoints.save(1, {"x": jnp.ones(8)})
    with monkeypatch.context() as patched:  # only of this save: threads of Orbax wait for futures, too
        patched.setattr(checkpoints._pending, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
    assert checkpoints in checkpoint._saving
    resumed.set()
    checkpoints.wait()
    assert checkpoints not in checkpoint._saving and checkpoints.folder.list_steps() == [1]


def test_checkpoint_of_another_model_is_refused_by_name(checkpoints):
    checkpoints.save(1, make_state(width=16))
    with pytest.raises(ValueError) as raised:
        checkpoints.restore(make_state(width=32) | {"more": jnp.ones(2)})
    text = str(raised.value)
    assert "model.layers[0].weight: float32 [16, 8] in the checkpoint, float32 [32, 8] here" in text
    assert "and 8 more" in text and text.count("\n") == 10
    with pytest.raises(ValueError, match=r"more: absent in the checkpoint, float32 \[2\] here"):
        checkpoints.restore(make_state(width=16) | {"more": jnp.ones(2)})


def test_checkpoint_of_another_split_into_segments_is_refused(checkpoints):
    whole = zoo.models.Transformer(vocab=8, embed=8, layers=3, heads=2, mlp=8, key=jr.key(0))
    checkpoints.save(1, whole)
    with pytest.raises(ValueError, match="another version split the layers otherwise: .*zoo.load"):
        checkpoints.restore(zoo.models.split_ends(whole, stages=2))
    with pytest.raises(ValueError, match="or start a run in another folder.$"):
        checkpoints.restore(zoo.models.keep_layers(whole, range(2)))


def test_checkpoint_missing_is_an_error(checkpoints):
    assert checkpoints.latest_step() is None
    with pytest.raises(FileNotFoundError, match="no whole checkpoint here"):
        checkpoints.restore({})
    checkpoints.save(4, {"x": jnp.ones(2)}, config={"embed": 8})
    with pytest.raises(FileNotFoundError, match=r"of step 3 here; it holds \[4\]"):
        checkpoints.restore({"x": jnp.ones(2)}, step=3)
    assert checkpoints.read_config() == {"embed": 8}


def test_checkpoint_all_damaged_is_an_error(tmp_path):
    state = {"x": jnp.ones(2)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    shutil.rmtree(tmp_path / "1" / "state")
    flip_bit(tmp_path / "2" / "about" / "metadata")
    with Checkpoints(tmp_path) as checkpoints:
        for read in (checkpoints.latest_step, lambda: checkpoints.restore(state), checkpoints.read_config):
            with pytest.raises(FileNotFoundError, match=r"all are damaged, and nothing was deleted") as raised:
                read()
            assert "2: the bytes of about/metadata have changed" in str(raised.value)
            assert "1: state/" in str(raised.value) and "is missing" in str(raised.value)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def flip_bit(path: Path, bit: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    bit = len(content) * 4 if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_checkpoint_of_a_flipped_bit_is_passed_over(tmp_path, caplog):
    """One bit of any file below the step's folder: the checkpoint before is restored, and a line says why."""
    first, second = {"x": jnp.arange(300.0)}, {"x": jnp.arange(300.0) + 1}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, first, data=1)
        checkpoints.save(2, second, data=2)
    notes = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # Orbax's, of the time of the save
    files = [path for path in sorted((tmp_path / "2").rglob("*")) if path.is_file()]
    assert len(files) > 10 and notes < {path.name for path in files}
    for path in files:
        pristine = path.read_bytes()
        flip_bit(path)
        caplog.clear()
        with Checkpoints(tmp_path) as checkpoints:
            restored = checkpoints.restore(first)
        unread = path.parent.name == "2" and path.name in notes
        assert (restored.step, restored.data) == ((2, 2) if unread else (1, 1))
        assert same(restored.state, second if unread else first)
        assert bool(caplog.records) != unread
        assert unread or ("2: passed over" in caplog.text and path.name in caplog.text)
        path.write_bytes(pristine)


def test_checkpoint_named_and_damaged_is_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(2)})
        checkpoints.save(2, {"x": jnp.ones(2)})
    flip_bit(next((tmp_path / "2" / "state" / "ocdbt.process_0" / "d").iterdir()))
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(FileNotFoundError, match=r"of step 2 here, because the bytes of state/.*; it holds \[1\]"):
            checkpoints.restore({"x": jnp.ones(2)}, step=2)
        assert checkpoints.verify(1) == 1


def test_checkpoint_of_sizes_alone_is_read_with_a_warning(tmp_path, caplog):
    """Lists of files as earlier versions wrote them; what Orbax cannot read is passed over."""
    state = {"x": jnp.arange(300.0)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    for step in "12":
        manifest = tmp_path / step / "files.json"
        files = json.loads(manifest.read_text())["files"]
        manifest.write_text(json.dumps({name: file["bytes"] for name, file in files.items()}))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(state).step == 2
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/2: of an earlier version, without digests; only sizes were verified"
    ]
    for name in ("about/metadata", "state/_METADATA"):
        path = tmp_path / "2" / name
        pristine = path.read_bytes()
        path.write_bytes(b"\0" * len(pristine))
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.restore(state).step == 1
            with pytest.raises(FileNotFoundError, match="step 2 here, because its (metadata|arrays) cannot be read"):
                checkpoints.restore(state, step=2)
            with pytest.raises(ValueError, match="of another model"):
                checkpoints.restore(state | {"y": jnp.ones(2)})
        path.write_bytes(pristine)


def test_checkpoint_best_is_kept_by_later_processes(tmp_path):
    """Each save in a `Checkpoints` of its own, as after a kill."""
    for step, metric in enumerate([3.0, 1.0, 2.0, None, 4.0, 5.0], start=1):
        with Checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
            checkpoints.save(step, {"x": jnp.ones(3)}, metric=metric)
    assert sorted(os.listdir(tmp_path)) == ["2", "5", "6"]
    with Checkpoints(tmp_path, keep_last=1, keep_best=2) as checkpoints:
        checkpoints.save(7, {"x": jnp.ones(3)}, metric=0.5)
    assert sorted(os.listdir(tmp_path)) == ["2", "7"]


@pytest.mark.parametrize("damage", [truncate, Path.unlink, lambda path: path.write_bytes(b"[]")])
def test_checkpoint_retention_reads_no_notes_of_orbax(tmp_path, damage):
    """Damage to files that no restore reads neither ends a save nor keeps a checkpoint for ever."""
    state = {"x": jnp.ones(3)}
    with Checkpoints(tmp_path, keep_last=1, keep_best=1) as checkpoints:
        for step, metric in ((1, 1.0), (2, 3.0), (3, 2.0)):
            checkpoints.save(step, state, metric=metric)
    for step in "13":
        damage(tmp_path / step / "_CHECKPOINT_METADATA")
    with Checkpoints(tmp_path, keep_last=1, keep_best=1) as checkpoints:
        assert checkpoints.restore(state).step == 3
        checkpoints.save(4, state, metric=4.0)
    assert sorted(os.listdir(tmp_path)) == ["1", "4"]


def test_checkpoint_that_cannot_be_deleted_is_named(checkpoints, monkeypatch, caplog):
    """The checkpoint itself is on disk: no error, and the next save tries again."""
    finish = checkpoints._finish_files

    def finish_and_obstruct():
        finish()
        (checkpoints.directory / "deleted").touch()

    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.ones(3)})
        checkpoints.wait()
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_finish_files", finish_and_obstruct)
        checkpoints.save(3, {"x": jnp.ones(3)})
        assert checkpoints.restorable_steps() == [1, 2, 3]
    assert "superfluous checkpoints were not deleted" in caplog.text
    checkpoints.save(4, {"x": jnp.ones(3)})
    assert checkpoints.restorable_steps() == [3, 4]


def test_checkpoint_later_steps_stay_until_a_save_is_complete(tmp_path, monkeypatch):
    state = {"x": jnp.ones(3)}
    with Checkpoints(tmp_path, keep_last=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state)
        assert checkpoints.restore(state, step=10).step == 10
    seen = []
    with Checkpoints(tmp_path, keep_last=3) as checkpoints:
        finish = checkpoints._finish_files

        def look_and_finish():
            seen.append(sorted(os.listdir(tmp_path)))
            finish()

        monkeypatch.setattr(checkpoints, "_finish_files", look_and_finish)
        checkpoints.save(15, state)
    assert seen == [["10", "15.orbax-checkpoint-tmp", "20", "30"]] and sorted(os.listdir(tmp_path)) == ["10", "15"]


def test_checkpoint_without_room_is_refused_before_it_is_written(checkpoints, monkeypatch):
    state = {"x": jnp.ones(1000)}
    checkpoints.save(1, state)
    checkpoints.wait()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9999, 9000, 999))
    with pytest.raises(
        OSError, match=r"no room for the checkpoint of step 2: its arrays take 4kB, and 999B are free; .* step 1"
    ):
        checkpoints.save(2, state)
    monkeypatch.undo()
    assert os.listdir(checkpoints.directory) == ["1"]
    checkpoints.save(2, state)
    assert checkpoints.latest_step() == 2


def test_checkpoint_on_a_disk_that_fills_leaves_the_one_before(checkpoints, monkeypatch):
    """The error of the background write comes with the next call, once, and the save after it succeeds."""
    state = {"x": jnp.ones(1000)}
    checkpoints.save(1, state)
    checkpoints.wait()

    def fill(folder, metric):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("zoo.train.checkpoint_folder.write_manifest", fill)
        checkpoints.save(2, state)
        with pytest.raises(
            OSError, match=r"step 2 was not written \(no space was left on the disk\): its arrays take 4kB"
        ):
            checkpoints.wait()
    assert os.listdir(checkpoints.directory) == ["1"]
    checkpoints.wait()
    checkpoints.save(3, state)
    assert checkpoints.restorable_steps() == [1, 3]


def test_checkpoint_failed_save_deletes_nothing_then_or_later(tmp_path, monkeypatch):
    """Step 1 would have gone with step 3, which was not written: it stays, and goes with step 4."""

    def fail(folder, metric):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.ones(3)})
        checkpoints.wait()
        with monkeypatch.context() as patched:
            patched.setattr("zoo.train.checkpoint_folder.write_manifest", fail)
            checkpoints.save(3, {"x": jnp.ones(3)})
            with pytest.raises(OSError, match="step 3 was not written"):
                checkpoints.wait()
        assert checkpoints.restorable_steps() == [1, 2]
        checkpoints.save(4, {"x": jnp.ones(3)})
        assert checkpoints.restorable_steps() == [2, 4]


def test_checkpoint_holds_numpy_arrays(checkpoints):
    """In their own dtypes, which JAX has not without x64; written as they were when `save` was called."""
    counts = np.arange(3) + 2**40
    state = {"x": jnp.ones(3), "counts": counts, "rate": np.float64(1 / 3), "empty": np.zeros((0, 2))}
    state |= {"half": np.ones(2, jnp.bfloat16), "ready": np.array([True, False])}
    checkpoints.save(1, state)
    counts += 1
    back = checkpoints.restore(jax.tree.map(np.zeros_like, state) | {"x": jnp.zeros(3), "rate": np.float64(0)}).state
    for name, x in (state | {"counts": counts - 1}).items():
        assert type(back[name]) is type(x) and back[name].dtype == x.dtype and np.array_equal(back[name], x)
    back["counts"] += 1
    with pytest.raises(ValueError, match=r"counts: int64 \[3\] in the checkpoint, int32 \[3\] here"):
        checkpoints.restore(state | {"counts": jnp.zeros(3, jnp.int32)})


def make_donated_array():
    x = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    return x


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (make_donated_array, "was donated to a program"),
        (lambda: np.array(["a"]), "is an array of <U1, which checkpoints cannot hold"),
        (lambda: np.ones(2, np.longdouble), "is an array of float128"),
    ],
)
def test_checkpoint_refuses_what_it_cannot_hold(checkpoints, make, says):
    checkpoints.save(1, {"x": jnp.ones(3)})
    with pytest.raises(ValueError, match=rf"model.weight {says}"):
        checkpoints.save(1, {"model": {"weight": make()}})
    assert checkpoints.restorable_steps() == [1]


def test_checkpoint_that_orbax_refuses_leaves_no_thread(checkpoints, monkeypatch):
    """Orbax's threads would wait for the folder of a save that never began, and the process would not end."""
    monkeypatch.setattr("zoo.train.checkpoint._require_savable", lambda arrays: None)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        checkpoints.save(1, {"x": make_donated_array()})
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert not [thread.name for thread in set(threading.enumerate()) - before if "save" in thread.name]
    checkpoints.save(2, {"x": jnp.ones(3)})
    assert checkpoints.restorable_steps() == [2] and os.listdir(checkpoints.directory) == ["2"]


def test_diff_configs():
    before = json.loads(json.dumps({"embed": 64, "data": ["a"], "old": 1}))
    assert diff_configs(before, {"embed": 128, "data": (Path("a"),), "new": True}) == [
        "embed: 64 in the checkpoint, 128 now",
        "old: 1 in the checkpoint, absent now",
        "new: absent in the checkpoint, True now",
    ]
