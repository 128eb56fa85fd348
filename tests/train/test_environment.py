"""The commit of a run is found without running a program that the repository names."""

import os
import subprocess

import pytest

from zoo.train import environment


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, in the current folder; git sees no other configuration."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    root = tmp_path / "re po"
    (root / "source").mkdir(parents=True)
    monkeypatch.chdir(root)
    (root / "source" / "model.py").write_text("pass\n")
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first")
    return root


def git(*words):
    return subprocess.run(("git", *words), check=True, capture_output=True, text=True).stdout.strip()


def test_commit_says_if_there_are_changes(repository, tmp_path, monkeypatch):
    commit = git("rev-parse", "HEAD")
    assert environment.collect_environment()["commit"] == commit
    monkeypatch.chdir(repository / "source")
    assert environment.collect_environment()["commit"] == commit
    (repository / ".gitignore").write_text("runs\n")
    assert environment._git_commit() == f"{commit}+changes"
    (repository / ".gitignore").unlink()
    (repository / ".git" / "info" / "exclude").write_text("runs\n")
    (repository / "runs").mkdir()
    (repository / "runs" / "log").write_text("line")
    assert environment._git_commit() == commit
    (repository / "source" / "model.py").write_text("exit\n")
    assert environment._git_commit() == f"{commit}+changes"
    monkeypatch.chdir(tmp_path)
    assert environment._git_commit() is None


def test_commit_runs_no_program_of_the_repository(repository, tmp_path):
    commit, trace = git("rev-parse", "HEAD"), tmp_path / "trace"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho run >> '{trace}'\ncat\n")
    program.chmod(0o755)
    for hook in ("post-index-change", "fsmonitor-watchman"):
        (repository / ".git" / "hooks" / hook).symlink_to(program)
    git("config", "filter.evil.clean", str(program))
    git("config", "core.fsmonitor", str(program))
    (repository / ".gitattributes").write_text("* filter=evil diff=evil\n")
    (repository / "source" / "model.py").write_text("exit\n")
    os.utime(repository / "source" / "model.py")
    git("status", "--porcelain")
    assert trace.exists(), "git itself runs them"
    trace.unlink()
    assert environment._git_commit() == f"{commit}+changes"
    assert not trace.exists()


def test_commit_of_a_damaged_or_slow_repository(repository, monkeypatch):
    commit = git("rev-parse", "HEAD")
    (repository / ".git" / "index").write_bytes(b"DIRC damaged")
    assert environment._git_commit() == f"{commit}+unchecked"
    monkeypatch.setattr(environment, "_GIT_SECONDS", 1e-9)
    assert environment._git_commit() is None
