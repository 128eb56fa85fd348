"""JAX's persistent compilation cache: where recipes and the command line keep it, and which programs must not use it.

A second start reads the programs of the first. Importing the library never turns the cache on.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from ._files import user_cache_folder

_MAX_BYTES = 2**30
_SETTINGS = {
    # Small programs too: before the first step there are twenty, and each takes longer than its entry.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_compilation_cache_max_size": _MAX_BYTES,
}

_log = logging.getLogger("zoo")


def enable_compile_cache(*, exact_names: bool = False) -> None:
    """Turn on JAX's persistent compilation cache in `equizoo/compiled`, in the user's cache folder.

    It keeps the programs last used, up to 1 GiB. JAX's own settings win: `JAX_COMPILATION_CACHE_DIR` moves the cache,
    `JAX_ENABLE_COMPILATION_CACHE=false` turns it off. If the folder cannot be written, one line is logged and every
    program is compiled.

    - `exact_names`: treat programs that differ only in scopes or source lines as different, for a profiler's traces.
    """
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is not None or not settings.jax_enable_compilation_cache:
        return
    try:
        folder = user_cache_folder() / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its entries are executed
        if not os.access(folder, os.W_OK):
            raise OSError(f"{folder} cannot be written")
    except OSError as error:
        _log.warning("compiled programs are not cached: %s", error)
        return
    for name, value in _SETTINGS.items():
        if name.upper() not in os.environ:
            settings.update(name, value)
    if exact_names:
        settings.update("jax_compilation_cache_include_metadata_in_key", True)
    settings.update("jax_compilation_cache_dir", str(folder))


def disable_cache_for_cpu_mesh(devices: Sequence[Any]) -> None:
    """Turn the persistent compilation cache off in this process if `devices` are several CPU devices.

    XLA:CPU runs the collectives of a program that it compiled one after another, as users of one resource. In a program
    read from the cache, every loop and branch has a resource of its own (`ThunkSequenceSerDesProtobuf::FromProto` in
    `xla/backends/cpu/runtime/thunk_proto_serdes.cc`), so collectives of two loops run at once. JAX gives all
    collectives one channel, and they meet each other's participants: the program returns other numbers without a word,
    crashes or hangs. Seen with jaxlib 0.10.2 and 0.12.0.1. One CPU device that stands in for several runs nothing.
    """
    runs_on_cpu = all(getattr(device, "platform", None) == "cpu" for device in devices)
    if not runs_on_cpu or len(set(devices)) < 2:
        return
    settings: Any = jax.config
    if not settings.jax_enable_compilation_cache:
        return
    if settings.jax_compilation_cache_dir is not None:
        _log.warning(
            "%s: the compilation cache is off: XLA misorders collectives of cached programs on several CPU devices",
            settings.jax_compilation_cache_dir,
        )
    settings.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks the setting once, at the first program


@contextlib.contextmanager
def compile_cache_disabled() -> Iterator[None]:
    """Compile every program anew, without the persistent compilation cache."""
    settings: Any = jax.config
    if not settings.jax_enable_compilation_cache:
        yield
        return
    settings.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks the setting once
    try:
        yield
    finally:
        settings.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
