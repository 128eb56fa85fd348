"""The environment of a run: versions, devices, git commit, command line."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from zoo._files import copy_file

_PACKAGES = ("equizoo", "jax", "jaxlib", "equinox", "optax", "grain", "orbax-checkpoint", "tokenizers", "numpy")
_GIT_SECONDS = 5


def collect_environment() -> dict[str, Any]:
    """Collect the contents of `env.json`.

    The commit ends in "+changes" if the work tree is dirty, in "+unchecked" if git could not tell within seconds. No
    program that the repository names is run for it: neither monitors nor hooks nor filters.
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
    paths = ("--git-path", "objects", "--git-path", "index", "--git-path", "info/exclude")
    try:
        commit, root, *found = _run_git("rev-parse", "HEAD", "--show-toplevel", *paths).splitlines()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    try:
        objects, index, exclude = (Path(path).absolute() for path in found)
        return commit + ("+changes" if _is_work_tree_dirty(commit, root, objects, index, exclude) else "")
    except (OSError, subprocess.SubprocessError, ValueError):
        return f"{commit}+unchecked"


def _is_work_tree_dirty(commit: str, root: str, objects: Path, index: Path, exclude: Path) -> bool:
    """Compare a work tree with a commit under a configuration of our own.

    `git status` runs the programs that a repository's configuration names (`core.fsmonitor`, `filter.NAME.clean`), and
    a repository that somebody else packed is read as soon as one works inside of it. So its objects and its index are
    borrowed by an empty repository.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        for name in ("objects/info", "refs", "info"):
            (own / name).mkdir(parents=True)
        (own / "HEAD").write_text(f"{commit}\n", encoding="utf-8")
        (own / "objects" / "info" / "alternates").write_text(f"{objects}\n", encoding="utf-8")
        object_format = "\n[extensions]\nobjectFormat = sha256\n" if len(commit) == 64 else ""
        version = int(bool(object_format))
        (own / "config").write_text(f"[core]\nrepositoryFormatVersion = {version}{object_format}", encoding="utf-8")
        if exclude.is_file():
            copy_file(exclude, own / "info" / "exclude")
        places = {"GIT_DIR": str(own), "GIT_WORK_TREE": root, "GIT_INDEX_FILE": str(index)}
        return bool(_run_git("-C", root, "status", "--porcelain", "--ignore-submodules=dirty", **places))


def _run_git(*arguments: str, **variables: str) -> str:
    options = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "safe.bareRepository=explicit")
    command = ["git", *(word for option in options for word in ("-c", option)), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", **variables}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=_GIT_SECONDS,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()


DETERMINISTIC_FLAG = "xla_gpu_deterministic_ops"


def require_deterministic_kernels() -> None:
    """Let XLA take deterministic kernels alone on GPUs, without autotuning, which measures: equal programs then give
    the same bits in every run. Adds a flag to `XLA_FLAGS`; call it before the first computation.

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
