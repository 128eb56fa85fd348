"""The environment of a run: versions, devices, git commit, command line."""

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("equizoo", "jax", "jaxlib", "equinox", "optax", "grain", "orbax-checkpoint", "tokenizers", "numpy")


def collect_environment() -> dict[str, Any]:
    """Collect the contents of `env.json`. The commit ends in "+changes" if the work tree is dirty."""
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
        return commit + ("+changes" if _run_git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _run_git(*arguments: str) -> str:
    done = subprocess.run(("git", *arguments), capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
