"""The environment of a run: its commit, and deterministic kernels."""

import os
import subprocess

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import zoo
from zoo.train import environment
from zoo.train.environment import DETERMINISTIC_FLAG, require_deterministic_kernels


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


def test_commit_of_a_damaged_or_slow_repository(repository, monkeypatch):
    commit = git("rev-parse", "HEAD")
    (repository / ".git" / "index").write_bytes(b"DIRC damaged")
    assert environment._git_commit() == f"{commit}+unchecked"
    monkeypatch.setattr(environment, "_GIT_SECONDS", 1e-9)
    assert environment._git_commit() is None


def test_deterministic_kernels_are_a_flag_of_xla(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    for _ in range(2):  # it is added once
        require_deterministic_kernels()
        assert os.environ["XLA_FLAGS"] == f"--mine --{DETERMINISTIC_FLAG}=true"
    monkeypatch.setenv("XLA_FLAGS", f"--{DETERMINISTIC_FLAG}=false")
    with pytest.raises(ValueError, match="remove one of the two"):
        require_deterministic_kernels()
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="before Python starts"):
        require_deterministic_kernels()


@pytest.mark.slow
def test_same_seed_gives_the_same_bits():
    """Three steps with dropout, compiled twice, on four devices that all-reduce."""
    mesh = zoo.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 16)
    batch = zoo.place_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)

    def run():
        make = lambda key: zoo.models.Transformer(vocab=16, embed=8, layers=1, heads=2, mlp=8, dropout=0.1, key=key)
        model, optimizer = zoo.init(make, jax.random.key(0), mesh), optax.adam(1e-2)
        opt_state = optimizer.init(zoo.trainable(model))

        @eqx.filter_jit
        def step(model, opt_state, key):
            loss_fn = lambda model, batch, key: zoo.cross_entropy(model, batch, key=key)
            _, gradients = zoo.value_and_grad(loss_fn, mesh)(model, batch, key=key)
            updates, opt_state = optimizer.update(gradients, opt_state, zoo.trainable(model))
            return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state

        for key in jax.random.split(jax.random.key(2), 3):
            model, opt_state = step(model, opt_state, key)
        return [np.asarray(x) for x in jax.tree.leaves((eqx.filter(model, eqx.is_array), opt_state))]

    first = run()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, run(), strict=True))
