"""A model of about a billion parameters on an accelerator: tokens/s, model FLOPs utilization (MFU), and decoding
against the memory bandwidth."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from . import measure, ours
from .measure import Timing

ROUNDS = 10
NEW_TOKENS = 256
POLICIES = ("none", "elementwise", "dots", "full")


def run(found: dict[str, Any], report: Callable, sizes: ours.Sizes = ours.ONE_BILLION) -> None:
    """Run every rematerialization policy with the largest batch that fits, then decoding.

    Each model is freed before the next is made. MFU is relative to the data sheet's rate if the device is listed, else
    to the measured matrix product.
    """
    kind = jax.devices()[0].device_kind
    print(
        f"\nlarge: {ours.count(sizes) / 1e9:.2f} billion parameters, bfloat16, rows of {sizes.seq} tokens", flush=True
    )
    ceilings = measure.contest(measure.ceilings(), ROUNDS)
    rates = measure.rates(ceilings)
    found.setdefault("ceilings", {})["large"] = rates
    peak = measure.peak_of(kind) or rates["matmul bfloat16"]
    found["large_peak"] = {"device": kind, "flops_per_second": peak, "listed": measure.peak_of(kind) is not None}
    for policy in POLICIES:
        for batch in (8, 4, 2, 1):
            now = dataclasses.replace(sizes, batch=batch)
            timed = attempt(lambda now=now, policy=policy: ours.Training(now, "bfloat16", policy))
            if timed is None:
                continue
            _, timing = timed
            facts: dict[str, Any] = {"tokens": now.batch * now.seq, "model_flops": now.model_flops}
            facts["utilization"] = now.model_flops / timing.median / peak
            name = f"zoo, {batch} x {sizes.seq}, remat={policy}"
            report(found, "large step", name, timing, facts, rates)
            print(f"    {facts['utilization']:.1%} of {peak / 1e12:,.0f} TFLOP/s")
            break
        else:
            print(f"  remat={policy}: not one row fits into the device's memory")
    for batch in (1, 8):
        timed = attempt(lambda batch=batch: ours.Decoding(sizes, batch, new=NEW_TOKENS, dtype="bfloat16"))
        if timed is None:
            print(f"  decoding at batch {batch}: does not fit into the device's memory")
            continue
        needed, timing = timed
        facts = {"tokens": batch * NEW_TOKENS, "bytes_needed": needed * NEW_TOKENS}
        report(found, "large decoding", f"zoo, batch {batch}", timing, facts, rates)


def attempt(make: Callable[[], Any]) -> tuple[float, Timing] | None:
    """Time the entrant that `make` returns, with the bytes read per token if it decodes; None if it does not fit into
    the device's memory. The entrant is freed."""
    try:
        run = make()
        run()
        needed = run.bytes_a_token() if isinstance(run, ours.Decoding) else 0.0
        return needed, measure.contest({"run": run}, ROUNDS)["run"]
    except jax.errors.JaxRuntimeError as error:
        refuse_others(error)
        return None


def refuse_others(error: Exception) -> None:
    """Raise `error` unless it says that memory is exhausted."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
