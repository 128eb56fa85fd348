"""Paired timing of entrants on a noisy machine, and the machine's peak rates."""

import dataclasses
import functools
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""FLOP/s of dense bfloat16 products with float32 sums, from NVIDIA's data sheets; H100 and H200 as SXM modules."""


_LONG = 3.0


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one entrant over all rounds: median, lower and upper quartile, and the shortest."""

    median: float
    low: float
    high: float
    shortest: float
    rounds: int
    seconds: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    """Each round's."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        low, median, high = (float(x) for x in np.percentile(seconds, (25, 50, 75)))
        return cls(median, low, high, min(seconds), len(seconds), tuple(seconds))

    def relative_to(self, other: "Timing") -> float:
        """Return the median over the rounds of this entrant's time divided by the other's in the same round."""
        return float(np.median(np.divide(self.seconds, other.seconds)))


def contest(entrants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time all entrants in turn, `rounds` times, in alternating order, so that other load affects all alike. Entrants
    block until done and are already compiled.

    Each turn is two calls, of which the second is timed: the first sees memory and caches as the rival left them, which
    costs XLA 0.2 to 0.5 s if PyTorch has returned its memory to the system. A call of over `_LONG` seconds needs no
    other before it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in entrants}
    for turn in range(rounds):
        names = list(entrants) if turn % 2 == 0 else list(entrants)[::-1]
        for name in names:
            if not seconds[name] or min(seconds[name]) < _LONG:
                entrants[name]()
            start = time.perf_counter()
            entrants[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing.of(found) for name, found in seconds.items()}


def amounts() -> tuple[int, int]:
    """Return the size of the matrices and the bytes of the copy that measure the ceilings."""
    return (1024, 2**27) if jax.default_backend() == "cpu" else (8192, 2**31)


def ceilings() -> dict[str, Callable[[], object]]:
    """Return the entrants that only multiply or copy, the peak rates that models are compared with. bfloat16 products
    accumulate in float32, and the copy is in place, since both are fastest so."""
    size, copied = amounts()
    square = jax.random.normal(jax.random.key(0), (size, size))
    halves = square.astype(jnp.bfloat16)
    multiply = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    held = [jnp.zeros(copied // 4)]

    def copy():
        held[0] = jax.block_until_ready(add(held[0]))

    found = {
        "matmul float32": lambda: jax.block_until_ready(multiply(square, square)),
        "matmul bfloat16": lambda: jax.block_until_ready(multiply(halves, halves)),
        "copy": copy,
    }
    for run in found.values():
        run()
    return found


def rates(timings: Mapping[str, Timing]) -> dict[str, float]:
    """Return FLOP/s of the products and bytes/s of the copy (read and written), from their shortest times."""
    return {name: amount / timings[name].shortest for name, amount in work().items()}


def work() -> dict[str, int]:
    """Return the FLOPs of a product, and the bytes that a copy reads and writes."""
    size, copied = amounts()
    return {"matmul float32": 2 * size**3, "matmul bfloat16": 2 * size**3, "copy": 2 * copied}


def peak_of(device: str) -> float | None:
    """Return the bfloat16 FLOP/s of an accelerator by its data sheet, or None if it is not listed."""
    return next((rate for name, rate in PEAKS.items() if name in device), None)


def machine() -> dict[str, str]:
    """Describe the machine: processor, cores, devices, versions, commit."""
    device = jax.devices()[0]
    facts = {"processor": processor(), "cores": str(len(os.sched_getaffinity(0)))}
    if device.platform != "cpu":
        facts["device"] = f"{jax.device_count()} x {device.device_kind}"
    if "GLIBC_TUNABLES" in os.environ:
        facts["GLIBC_TUNABLES"] = os.environ["GLIBC_TUNABLES"]
    return {**facts, "python": platform.python_version(), "jax": jax.__version__, "commit": commit()}


def processor() -> str:
    """Return the processor's model and its vector extensions for matrix products."""
    try:
        rows = [row.partition(":") for row in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        return platform.processor() or platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in reversed(rows)}
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.machine())} ({', '.join(units) or 'no AVX'})"


def commit() -> str:
    """Return the measured commit, and whether the work tree is dirty."""
    git = lambda *words: subprocess.run(("git", *words), cwd=Path(__file__).parent, capture_output=True, text=True)
    try:
        found, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except OSError:
        return "unknown"
    return found.stdout.strip() + (" with changes" if changed.stdout.strip() else "") or "unknown"
