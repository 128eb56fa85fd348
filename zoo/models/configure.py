"""Options of how a model computes: implementations, rematerialization, the loop over layers, and the routing."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import jax

from zoo.parallel import Module
from zoo.parallel.module import find_operations, replace_option
from zoo.parallel.remat import Remat, check_remat

from .decoder import AbstractStack, RoutingDetail, UnrolledStack
from .loop import Loop, check_loop
from .stack import Stack, swap_stack

_Model = TypeVar("_Model")


def configure(
    model: _Model,
    *,
    remat: Remat | None = None,
    loop: Loop | None = None,
    attention: str | Callable | None = None,
    recurrence: str | None = None,
    grouped_matmul: str | None = None,
    routing: RoutingDetail | None = None,
) -> _Model:
    """Return `model` with other implementation options. Its parameters stay the same, and its results up to rounding.
    Options that are None stay as they are.

        model = zoo.configure(model, remat="full", attention="blockwise")

    Implementations take any module or tree of modules: a decoder, loaded or new, stacked, with adapters, quantized; a
    block; a mixer. The other options take a model with one `zoo.models.Stack`, or `TwoTowers`. Parameters are shared
    with `model`.

    - `remat`: what the backward pass recomputes to save memory: "none", "elementwise", "dots", "full", or a
      `zoo.parallel.SaveNames`.
    - `loop`: "scan", "ahead", "plain", "auto", or the number of repeats of a pattern per iteration of a scan.
    - `attention`: "auto", "grouped", "blockwise" or another name in `zoo.ops.attention.ATTENTION`; or a function with
      the arguments of `zoo.ops.attention.reference_attention`.
    - `recurrence`: "auto", "chunked", "recurrent", and "pallas" for the recurrences that have such a kernel.
    - `grouped_matmul`: "auto", "padded", "ragged", "masked" or "reference", for mixtures of experts.
    - `routing`: what `Hidden.routing` has: "rows", sums over the tokens of each row; "tokens", also every token's
      router logits and experts, which take layers x tokens x experts of memory.

    **Raises** `ValueError` for a value that an option does not have, for an implementation of what no layer of the
    model computes, and if the layers are in a stack without the option. Whether an implementation can compute the
    model's shapes on its platform is checked in the first call, which raises `ValueError` with the reason;
    `zoo.inspect.implementations` says it before.
    """
    given = {"attention": attention, "recurrence": recurrence, "grouped_matmul": grouped_matmul}
    for kind, value in given.items():
        if value is not None:
            model = _set_implementation(model, kind, value)
    if remat is not None:
        model = _set_remat(model, remat)
    if loop is not None:
        model = _set_loop(model, loop)
    if routing is not None:
        model = _set_routing(model, routing)
    return model


def set_implementations(
    model: _Model,
    *,
    attention: str | Callable | None = None,
    recurrence: str | None = None,
    grouped_matmul: str | None = None,
) -> _Model:
    """Return `model` with other implementations in all layers of a kind: `configure`, with these options only."""
    return configure(model, attention=attention, recurrence=recurrence, grouped_matmul=grouped_matmul)


def _set_remat(model: _Model, remat: Remat) -> _Model:
    def replace(stack: AbstractStack) -> AbstractStack:
        if not isinstance(stack, Stack):
            raise ValueError(f"{type(stack).__name__} does not rematerialize: swap in a Stack before")
        return replace_option(stack, "remat", check_remat(remat))

    return swap_stack(model, replace)


def _set_loop(model: _Model, loop: Loop) -> _Model:
    def replace(stack: AbstractStack) -> AbstractStack:
        if not isinstance(stack, Stack):
            raise ValueError(f"{type(stack).__name__} has no choice of its loop: swap in a Stack before")
        return replace_option(stack, "loop", check_loop(loop))

    return swap_stack(model, replace)


def _set_routing(model: _Model, routing: RoutingDetail) -> _Model:
    if routing not in get_args(RoutingDetail):
        raise ValueError(f"routing is one of {', '.join(get_args(RoutingDetail))}, not {routing!r}")

    def replace(stack: AbstractStack) -> AbstractStack:
        if not isinstance(stack, Stack | UnrolledStack):
            raise ValueError(f"{type(stack).__name__} has no choice of its routing decisions: swap in a Stack before")
        return replace_option(stack, "routing", routing)

    return swap_stack(model, replace)


def _set_implementation(model: _Model, kind: str, value: str | Callable) -> _Model:
    changed: list[Module] = []
    model = _replace(model, kind, value, changed)
    if not changed:
        raise ValueError(f"{kind}={value!r}: {type(model).__name__} has no layer that computes it")
    return model


def _replace(tree: Any, kind: str, value: Any, changed: list[Module]) -> Any:
    """Set `value` in all modules of a tree whose operation is of this kind, and append them to `changed`."""
    is_choice = lambda x: isinstance(x, Module) and bool(find_operations(x))

    def replace(node: Any) -> Any:
        if not is_choice(node):
            return node
        for name, operation in find_operations(node):
            if operation.kind == kind:
                if isinstance(value, str):
                    operation.check_name(value)
                node = replace_option(node, name, value)
                changed.append(node)
        outer = node
        return jax.tree.map(replace, outer, is_leaf=lambda x: x is not outer and is_choice(x))

    return jax.tree.map(replace, tree, is_leaf=is_choice)
