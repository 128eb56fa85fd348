"""Devices of a topology that this machine does not have, for which XLA's TPU and CUDA compilers compile all the same.

    mesh = zoo.make_mesh(fsdp=4, tensor=2, devices=zoo.parallel.imagined("v5e:2x4"))

They hold no arrays and run nothing. A program for them is compiled from shapes, `zoo.inspect.compiled(step, *shapes)`.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from zoo._optional import require_installed

from .topology import parse_topology

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""XLA's `GpuTargetConfigProto` of an H100 SXM: its data sheet, and the limits of compute capability 9.0 in NVIDIA's
CUDA C++ Programming Guide."""

_B200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 148 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 7672320000000 l2_cache_size: 132644864 clock_rate_ghz: 1.965
  device_memory_size: 191505104896 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 10 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA B200"
"""
"""The same of a B200: limits of compute capability 10.0."""

_GPU_TARGETS = {"h100": _H100, "b200": _B200}

_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # asks no metadata server which TPU this machine has
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # of this machine, which has none: any, or libtpu warns
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs on a TPU, so other processes may hold it
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def imagined(topology: str) -> list[Any]:
    """Return the devices of a topology that this machine does not have, to pass to `zoo.make_mesh(devices=...)`.

    - `"v5e:2x4"`, `"v6e:4x4"`, `"v5p:4x4x4"`, `"tpu7x:2x2x1"`: TPU chips in a grid or torus. `"v5p:4x4x4*2"` are two
      slices. A tpu7x has two devices per chip.
    - `"h100:8"`, `"b200:8"`: the GPUs of one host; `"h100:8x8"`: hosts x GPUs.

    libtpu reads a few environment variables when it is first loaded: they are set for that moment and then put back.

    **Raises** `MissingExtraError` without the compiler: `aot-tpu` or `aot-cuda`; `ValueError` for an unknown topology;
    `RuntimeError` if JAX has refused to load the CUDA compiler because CUDA's other libraries are missing, which it
    does unless `JAX_PLATFORMS=cpu` is set.
    """
    found = parse_topology(topology)
    sizes = "x".join(map(str, found.sizes))
    if found.is_tpu:
        return _make_tpus(f"{found.kind}:{sizes}", found.slices)
    if found.kind not in _GPU_TARGETS:
        raise ValueError(
            f"XLA's description of {found.kind} is missing here, and programs compile only for "
            f"{' and '.join(_GPU_TARGETS)}: {topology}"
        )
    return _make_gpus(_GPU_TARGETS[found.kind], f"1x{sizes}")


def is_imagined(device: Any) -> bool:
    """Return True for a device of `imagined`, which holds no arrays."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def _make_tpus(name: str, slices: int) -> list[Any]:
    require_installed("libtpu", extra="aot-tpu")
    with _environment(_TPU_ENVIRONMENT):
        try:
            return topologies.get_topology_desc(name, "tpu", num_slices=slices).devices
        except jax.errors.JaxRuntimeError as error:
            if "INVALID_ARGUMENT" not in str(error):
                raise
            raise ValueError(f"libtpu has no topology {name!r}: {error}") from error


def _make_gpus(target: str, sizes: str) -> list[Any]:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        require_installed("jax_cuda12_plugin", extra="aot-cuda")
    try:
        return topologies.get_topology_desc(platform="cuda", topology=sizes, target_config=target).devices
    except NotImplementedError as error:
        raise RuntimeError(
            "JAX did not load its CUDA plugin: without cuDNN and CUDA's other libraries it does so only if it is to "
            "run on something else. Start Python with JAX_PLATFORMS=cpu"
        ) from error


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables that are not set yet, and unset them afterwards."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
