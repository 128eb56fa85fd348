"""Directories of runs: refused before anything is made, and held by one run at a time."""

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from zoo.train.directory import DirectoryLock, check_directory, claim_directory

IMPOSSIBLE = {
    "a file": ("file", r"file cannot hold a run \(.*file is a file\)"),
    "below a file": ("file/a/b", r"file/a/b cannot hold a run \(.*file is a file\)"),
    "a name of 300 bytes": ("x" * 300, r"cannot hold a run \(File name too long\)"),
    "a link to nothing": ("link/a", r"link/a cannot hold a run \(.*link is a link to nothing\)"),
    "a NUL byte": ("a\0b", r"cannot hold a run \(.*embedded null"),
    "a filesystem without files": ("/proc/run", r"/proc/run cannot hold a run \("),
}


@pytest.mark.parametrize(("name", "says"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_directory_that_cannot_hold_a_run_is_refused(tmp_path, name, says):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(OSError, match=says + r".*: choose another folder \(--out\)"):
        claim_directory(DirectoryLock(tmp_path / name))
    with pytest.raises(OSError, match=says + r".*: choose another folder \(--out\)"):
        check_directory(tmp_path / name)
    assert (tmp_path / "file").read_text() == "text" and sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    """As on a read-only filesystem; the user of the tests may be allowed to write anywhere."""

    def refuse(**options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(OSError, match=r"cannot hold a run \(Read-only file system\)"):
        claim_directory(DirectoryLock(tmp_path))


def test_directory_of_other_things_is_refused(tmp_path):
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        (tmp_path / name).touch()
    with pytest.raises(FileExistsError, match=r"things than a run \(README.md, model.safetensors, tokenizer.json\)"):
        claim_directory(DirectoryLock(tmp_path), resume=True)
    assert len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize(
    "name", ["slurm-12.out", ".gitignore", "config.json", "env.json", "metrics.jsonl", "run.lock", "sub/env.json"]
)
def test_directory_of_a_run_or_of_logs_is_taken(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    lock = DirectoryLock(tmp_path)
    claim_directory(lock)
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]] or name == "run.lock"


def test_directory_of_checkpoints_wants_resume(tmp_path):
    (tmp_path / "checkpoints" / "30").mkdir(parents=True)
    lock = DirectoryLock(tmp_path)
    with pytest.raises(FileExistsError, match=r"holds a run of 30 steps: resume it \(--resume\)"):
        claim_directory(lock)
    for resume in (True, 30):
        claim_directory(lock, resume=resume)
        lock.release()


def test_directory_without_the_named_step_is_refused(tmp_path):
    for step in (10, 20):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint of step 7 here; it holds \[10, 20\]"):
        check_directory(tmp_path, resume=7)
    check_directory(tmp_path, resume=10)
    check_directory(tmp_path / "new", resume=7)


def test_directory_that_is_checked_stays_as_it_was(tmp_path):
    check_directory(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="is a file"):
        check_directory(tmp_path / "file" / "b")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    check_directory(tmp_path / "run", resume=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoints", "file", "run"]


def test_lock_is_held_once(tmp_path):
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    with pytest.raises(BlockingIOError, match=f"in use by process {os.getpid()} on {socket.gethostname()} since 2"):
        second.acquire()
    first.release()
    assert not os.listdir(tmp_path)
    second.acquire()
    second.release()


def test_lock_of_another_process_ends_with_it(tmp_path):
    program = """
        import fcntl, sys, time
        file = open(sys.argv[1], "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("process 12 on elsewhere", file=file, flush=True)
        print("ready", flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", "if 1:" + program, str(tmp_path / "run.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with pytest.raises(BlockingIOError, match="in use by process 12 on elsewhere: end that run, or choose another"):
            DirectoryLock(tmp_path).acquire()
        process.send_signal(signal.SIGKILL)
        process.wait()
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    assert f"process {os.getpid()} on" in Path(tmp_path / "run.lock").read_text()
    lock.release()


def test_directory_is_checked_by_many_at_a_time(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(check_directory, [tmp_path] * 40))
        assert not any(pool.map(check_directory, [tmp_path / "new" / "run"] * 40))


def test_lock_without_flock_warns(tmp_path, caplog, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    DirectoryLock(tmp_path).acquire()
    assert "cannot be locked (Operation not supported): start no second run in it" in caplog.text


def test_lock_follows_no_link(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / "run.lock").symlink_to("precious")
    with pytest.raises(OSError, match="run.lock"):
        DirectoryLock(tmp_path).acquire()
    assert (tmp_path / "precious").read_text() == "text"
