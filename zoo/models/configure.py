"""Replacement of the implementations that the layers of a model use."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from zoo.parallel import Module, find_operations, replace_option

_Model = TypeVar("_Model")


def set_implementations(
    model: _Model,
    *,
    attention: str | Callable | None = None,
    recurrence: str | None = None,
    grouped_matmul: str | None = None,
) -> _Model:
    """Return `model` with other implementations in all layers of a kind. What a model computes stays the same.

    Takes any module or tree of modules: a decoder, loaded or new, stacked, with adapters, quantized; a block; a mixer.
    Parameters are shared with `model`, and neither checkpoints nor results depend on it but by rounding.

    - `attention`: "auto", "grouped", "blockwise" or another name in `zoo.ops.attention.ATTENTION`; or a function with
      the arguments of `zoo.ops.attention.reference_attention`.
    - `recurrence`: "auto", "chunked", "recurrent", and "pallas" for the recurrences that have such a kernel.
    - `grouped_matmul`: "auto", "padded", "ragged" or "reference", for mixtures of experts.

    **Raises** `ValueError` for a model without layers of a kind that is given, and for a name that the operation of one
    of them does not have. Whether an implementation can compute the model's shapes on its platform is checked in the
    first call, which raises `ValueError` with the reason; `zoo.inspect.implementations` says it before.
    """
    given = {"attention": attention, "recurrence": recurrence, "grouped_matmul": grouped_matmul}
    given = {kind: value for kind, value in given.items() if value is not None}
    for kind, value in given.items():
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
