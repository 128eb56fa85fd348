"""Rematerialization (activation checkpointing): what the backward pass of a layer saves, and what it recomputes.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax

from zoo.ops.platform import current_platform

from .collectives import current_mesh
from .taps import current_taps, lift, lifted

RematPolicy = Literal["none", "elementwise", "dots", "full"]
"""Policies by name, from the most memory to the most recomputation."""

RESIDUAL_NAMES = ("query", "key", "value", "attention", "mlp_hidden", "mixer_output", "ffn_output")
"""Names of activations that layers tag with `jax.ad_checkpoint.checkpoint_name`: queries, keys and values as attention
multiplies them; its output before the last projection; the input of an MLP's last projection; the updates that a mixer
and a feed-forward layer add to the residual stream."""


@dataclasses.dataclass(frozen=True)
class SaveNames:
    """A rematerialization policy that saves activations by name, and computes everything else again.

        model = zoo.configure(model, remat=zoo.parallel.SaveNames(("attention",), offload=("mlp_hidden",)))

    - `names`: saved in the memory of the device.
    - `offload`: saved in the memory of the host, and copied back for the backward pass. Only on GPUs and TPUs.

    **Raises** `ValueError` for a name that is not one of `RESIDUAL_NAMES`, or is in both.
    """

    names: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self):
        both = (*self.names, *self.offload)
        if unknown := [name for name in both if name not in RESIDUAL_NAMES]:
            raise ValueError(f"no activation is named {unknown[0]!r}: take some of {', '.join(RESIDUAL_NAMES)}")
        if len(set(both)) < len(both):
            raise ValueError(f"an activation is saved on the device or on the host, once: {self}")


Remat = RematPolicy | SaveNames

_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,
    "elementwise": jax.checkpoint_policies.dots_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
_ALWAYS_RECOMPUTED = ("all_gather", "all_gather_invariant", "pvary", "pcast")


def rematerialize(function: Callable, remat: Remat, *, prevent_cse: bool = False) -> Callable:
    """Rematerialize `function` (activation checkpointing): recompute residuals in the backward pass, by `remat`.

    - `"none"`: save every residual.
    - `"elementwise"`: save the results of matrix products, recompute everything else.
    - `"dots"`: save the results of matrix products without batch dims, so that attention scores are recomputed too.
    - `"full"`: save only the inputs.
    - `SaveNames(...)`: save the inputs and the named activations, on the device or on the host.

    Gathered parameters are never saved, whatever `remat` is: the backward pass all-gathers them again. Otherwise a loop
    over layers would hold the full parameters of every layer.

    Outside the body of a scan, `prevent_cse` keeps XLA from merging the recomputation with the forward pass.

    **Raises** `NotImplementedError` for `offload` on CPUs, whose memory is the host's.
    """
    if not rematerializes(remat):
        return function
    choose = _choose_names(remat) if isinstance(remat, SaveNames) else _POLICIES[remat]

    def policy(primitive, *avals, **params):
        equations = [(primitive, avals, params)]  # a custom VJP is one equation: look at the equations inside it too
        inside = getattr(params.get("call_jaxpr"), "eqns", ())
        equations += [(eqn.primitive, [x.aval for x in eqn.invars], eqn.params) for eqn in inside]
        names = {primitive.name for primitive, _, _ in equations}
        if names.intersection(_ALWAYS_RECOMPUTED):
            return False
        if isinstance(remat, SaveNames):
            return choose(primitive, *avals, **params)
        if "reduce_scatter" in names and remat in ("elementwise", "dots"):
            return True  # in place of the matrix product that it sums, which has the tokens of all devices
        return any(choose(primitive, *avals, **params) for primitive, avals, params in equations)

    checkpoint = partial(jax.checkpoint, policy=policy, prevent_cse=prevent_cse)
    if current_taps() is None:
        return checkpoint(function)
    checkpointed = checkpoint(lifted(function))

    def run(*args: Any) -> Any:
        result, values = checkpointed(*args)
        lift(values)
        return result

    return run


def check_remat(remat: Remat) -> Remat:
    """Return `remat`. **Raises** `ValueError` for an unknown policy."""
    if not isinstance(remat, SaveNames) and remat not in _POLICIES:
        raise ValueError(f"remat is one of {', '.join(get_args(RematPolicy))}, or SaveNames(...), not {remat!r}")
    return remat


def _choose_names(remat: SaveNames) -> Callable[..., Any]:
    """Return the policy of `SaveNames`, checked against the platform that is traced for."""
    if not remat.offload:
        return jax.checkpoint_policies.save_only_these_names(*remat.names)
    mesh = current_mesh()
    platform = current_platform() if mesh is None else mesh.platform
    if platform == "cpu":
        raise NotImplementedError(
            f"{', '.join(remat.offload)}: a CPU computes in the memory of the host, and has no other to offload to: "
            "save these on the device, SaveNames(names), or compute them again"
        )
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(remat.names),
        names_which_can_be_offloaded=list(remat.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )


def rematerializes(remat: Remat) -> bool:
    """Return True if `rematerialize` recomputes anything: by `remat`, or because parameters are sharded at rest.

    **Raises** `ValueError` for an unknown policy.
    """
    check_remat(remat)
    mesh = current_mesh()
    return remat != "none" or (mesh is not None and bool(mesh.axes_at_rest))
