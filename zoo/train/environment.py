"""The environment of a run: versions, devices, git commit, command line."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("equizoo", "jax", "jaxlib", "equinox", "optax", "grain", "orbax-checkpoint", "tokenizers", "numpy")
_GIT_SECONDS = 5


def collect_environment() -> dict[str, Any]:
    """Collect the contents of `env.json`.

    The commit ends in "+changes" if the work tree is dirty, in "+unchecked" if git could not tell within seconds.
    """
    devices = jax.devices()
    return dict(
        command=sys.argv,
        directory=str(Path.cwd()),
        commit=_git_commit(),
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: version for name in _PACKAGES if (version := _package_version(name))},
        backend=jax.default_backend(),
        devices={
            kind: sum(d.device_kind == kind for d in devices) for kind in sorted({d.device_kind for d in devices})
        },
        processes=jax.process_count(),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
    )


def _package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Return the commit of the current folder's repository, or None without one or without git."""
    try:
        commit = _run_git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        changes = _run_git("status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return f"{commit}+unchecked"
    if changes:
        return f"{commit}+changes"
    return commit


def _run_git(*words: str) -> str:
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *words]  # a monitor may take long to start
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS).stdout.strip()


DETERMINISTIC_FLAG = "xla_gpu_deterministic_ops"


def require_deterministic_kernels() -> None:
    """Let XLA take only deterministic kernels on GPUs, without autotuning, which depends on measured times: equal
    programs then give the same bits in every run. Adds a flag to `XLA_FLAGS`; call it before the first computation.

    **Raises** `RuntimeError` if JAX has run a computation already, since it reads the flags once, and `ValueError` if
    `XLA_FLAGS` say the opposite.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if f"--{DETERMINISTIC_FLAG}=false" in flags:
        raise ValueError(f"--deterministic, and XLA_FLAGS has --{DETERMINISTIC_FLAG}=false: remove one of the two")
    if DETERMINISTIC_FLAG in flags:
        return
    from jax._src import xla_bridge  # no public function tells without starting a backend

    if xla_bridge.backends_are_initialized() and jax.default_backend() == "gpu":
        raise RuntimeError(f"JAX has started already: set XLA_FLAGS=--{DETERMINISTIC_FLAG}=true before Python starts")
    os.environ["XLA_FLAGS"] = f"{flags} --{DETERMINISTIC_FLAG}=true".strip()
