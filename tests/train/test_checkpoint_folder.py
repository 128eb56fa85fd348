"""Folders of checkpoints, most of them below a URL, as in an object store that renames nothing."""

import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem
from jax.sharding import NamedSharding, PartitionSpec

import zoo
from zoo import train
from zoo.train.checkpoint_folder import CheckpointFolder, parse_url


def place(devices, value):
    mesh = zoo.make_mesh(fsdp=devices, data=1, devices=jax.devices()[:devices]).devices
    return {"table": jax.device_put(jnp.full((8, 4), value), NamedSharding(mesh, PartitionSpec("fsdp")))}


def test_checkpoints_below_a_url(tmp_path, caplog):
    url = f"file://{tmp_path}/runs/7/"
    with train.Checkpoints(url, keep_last=1, keep_best=1) as checkpoints:
        for step, metric in ((1, 3.0), (2, 1.0), (3, 2.0)):
            checkpoints.save(step, place(8, float(step)), data={"row": step}, config={"width": 4}, metric=metric)
        assert checkpoints.restorable_steps() == [2, 3]
    folder = tmp_path / "runs" / "7"
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"], "nothing is renamed, nothing is left"
    assert sorted(path.name for path in (folder / "2").iterdir() if path.is_dir()) == ["about", "state"]

    with train.Checkpoints(url) as checkpoints:
        step, state, data, config = checkpoints.restore(place(2, 0.0))
        assert (step, data, config) == (3, {"row": 3}, {"width": 4})
        assert np.all(np.asarray(state["table"]) == 3) and len(state["table"].sharding.device_set) == 2
        with pytest.raises(FileNotFoundError, match=r"no whole checkpoint of step 1 here.*it holds \[2, 3\]"):
            checkpoints.verify(1)
        with pytest.raises(ValueError, match="table"):
            checkpoints.restore({"table": jnp.zeros((8, 5))})

        (folder / "3" / "commit_success.txt").unlink()  # as if a process had died while it wrote
        assert checkpoints.latest_step() == 2
        assert f"{url.rstrip('/')}/3: passed over, it was never finished" in caplog.text
        checkpoints.save(4, place(1, 4.0))
        checkpoints.wait()
        assert checkpoints.folder.list_steps() == [2, 4]
        checkpoints.save(2, place(1, 5.0))  # replaces it, and deletes what came later
        assert checkpoints.restore(place(1, 0.0)).state["table"][0, 0] == 5
        assert checkpoints.folder.list_steps() == [2]

        for file in (folder / "2" / "state").rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
        with pytest.raises(
            FileNotFoundError, match=r"all are damaged, and nothing was deleted:\n  2: its arrays cannot be"
        ):
            checkpoints.restore(place(1, 0.0))


@pytest.mark.parametrize("file", ["state/array_metadatas/process_0", "about/metadata", "commit_success.txt"])
def test_checkpoint_below_a_url_that_lacks_a_file_is_passed_over(tmp_path, caplog, file):
    """A store has no digests. Without their metadata, which Orbax does not miss, keys would be integers."""
    states = [{"table": jnp.full(300, step), "key": jax.random.key(step)} for step in range(3)]
    with train.Checkpoints(f"file://{tmp_path}") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, states[step])
    (tmp_path / "2" / file).unlink()
    with train.Checkpoints(f"file://{tmp_path}") as checkpoints:
        step, state, _, _ = checkpoints.restore(states[0])
    assert step == 1 and state["key"] == states[1]["key"] and np.array_equal(state["table"], states[1]["table"])
    assert "2: passed over" in caplog.text


class Counter:
    """A data iterator: 1, 2, 3, ..."""

    state = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.state += 1
        return self.state

    def restore(self, state):
        self.state = state


def add_up(out, steps, **flags):
    """Add up the batches, and save every other sum."""
    options, batches = train.RunOptions(out, **flags), Counter()
    with train.Run(options, config={"run_options": options, "width": 1}) as run:
        total = run.restore(jnp.zeros(()), batches)
        for batch in run.steps(batches, steps):
            total = total + batch
            run.log(total=total)
            if run.due(2):
                run.save(total, batches)
    return float(total)


def test_run_with_checkpoints_below_a_url(tmp_path):
    out, url = tmp_path / "out", f"file://{tmp_path}/bucket"
    assert add_up(out, 4, checkpoint_url=url) == 10
    assert not (out / "checkpoints").exists()
    with pytest.raises(FileExistsError, match=r"bucket holds a run of 4 steps: resume it"):
        add_up(tmp_path / "other", 4, checkpoint_url=url)
    with pytest.raises(ValueError, match=f"resume it with --checkpoint-url {url}"):
        add_up(out, 6, resume=True)
    assert add_up(out, 6, resume=True, checkpoint_url=url) == 21
    assert add_up(tmp_path / "elsewhere", 8, resume=True, checkpoint_url=url) == 36  # only the checkpoints are needed
    assert [line["step"] for line in train.read_metrics(tmp_path / "elsewhere" / "metrics.jsonl")] == [7, 8]
    assert train.RunOptions(out, checkpoint_url=url).subrun("moe").checkpoints == f"{url}/moe"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket/run", r"gs://BUCKET/FOLDER or file:///FOLDER\. Orbax writes to Google's store only: mount"),
        ("file://run", r"'file://run': expected gs://BUCKET/FOLDER or file:///FOLDER$"),
        ("gs://", r"'gs://': expected"),
    ],
)
def test_url_of_another_kind_is_refused(url, says):
    with pytest.raises(ValueError, match=says):
        parse_url(url)


def test_google_storage_asks_for_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match="pip install gcsfs"):
        CheckpointFolder("gs://bucket/run")


@pytest.fixture
def bucket(monkeypatch):
    """A store in memory for `gs://`, in place of Google's."""

    class Bucket(MemoryFileSystem):
        protocol, store, pseudo_dirs, cachable = ("gcs", "gs"), {}, [""], False

    monkeypatch.setitem(sys.modules, "gcsfs", types.ModuleType("gcsfs"))
    monkeypatch.setattr(type(backend.fsspec_backend), "_get_filesystem", lambda self, name: Bucket())
    return Bucket


def test_folder_of_a_bucket_lists_finishes_and_deletes(bucket):
    folder = CheckpointFolder("gs://bucket/run/")
    assert str(folder.path / "3") == "gs://bucket/run/3", "as Orbax gets it"
    assert folder.list_steps() == [] and folder.find_newest() is None and folder.make_room(3, 10**15) is None
    for step, metric in ((3, 1.0), (5, 2.0), (7, None), (9, 3.0)):
        path = folder.path / str(step)
        path.mkdir(parents=True)
        (path / "about").mkdir()
        (path / "about" / "metadata").write_text(f'{{"step": {step}}}')
        folder.finish(step, metric)
        if step < 9:
            (path / "commit_success.txt").write_text("whole")
    assert folder.list_steps() == folder.list_whole_steps() == [3, 5, 7]
    assert folder.find_newest() == folder.require_whole(7) == 7 and folder.read_metadata(5) == {"step": 5}
    assert [folder.read_metric(step) for step in (3, 5, 7)] == [1, 2, None]
    assert folder.make_room(7, 1) is None  # it takes the place of the one before; the unfinished one goes
    assert folder.list_steps() == [3, 5]
    assert not any("/7/" in name or "/9/" in name for name in bucket.store)


def test_manager_of_a_bucket_asks_for_no_bucket(bucket):
    """Orbax's own listing needs Google's client, and the permission to read the bucket itself."""
    with train.Checkpoints("gs://bucket/run") as checkpoints:
        for step in (3, 5):
            (checkpoints.directory / str(step)).mkdir(parents=True)
        (checkpoints.directory / "3" / "commit_success.txt").write_text("whole")
        manager = checkpoints._make_manager()
        assert manager.all_steps() == [3]
        manager.close()


def test_url_for_the_folder_of_a_run_is_refused():
    says = r"gs://bucket/run is a URL.*--out runs/run --checkpoint-url gs://bucket/run"
    with pytest.raises(ValueError, match=says):
        train.RunOptions(Path("gs://bucket/run"))
    with pytest.raises(ValueError, match=says):
        CheckpointFolder(Path("gs://bucket/run"))


def test_folder_of_a_kill_while_deleting_is_tidied(tmp_path):
    """Earlier versions renamed step 6 to `6.deleted`; a folder of another name is not the library's."""
    for name in ("deleted/4/state", "6.deleted/state", "8.orbax-checkpoint-tmp-12/state", "10", "undeleted"):
        (tmp_path / name).mkdir(parents=True)
    folder = CheckpointFolder(tmp_path)
    assert folder.list_steps() == [10]
    folder.delete_unfinished()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "undeleted"]
