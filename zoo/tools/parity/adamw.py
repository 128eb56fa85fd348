"""The optimizer of a stored run in optax, and the moments in its state."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from zoo.models.hf.spec import NameMap
from zoo.weights.plan import plan_tensors

from .stored_run import StoredRun


def make_adamw(run: StoredRun, params: PyTree, name_map: NameMap) -> Any:
    """Return `torch.optim.AdamW` after `torch.nn.utils.clip_grad_norm_`, which adds 1e-6 to the norm.

    **Raises** `ValueError` if an array of `params` holds layers with and without weight decay.
    """
    import optax

    rates = jnp.asarray(run.learning_rates)
    adamw = optax.adamw(
        lambda step: rates[step],
        run.b1,
        run.b2,
        run.eps,
        weight_decay=run.weight_decay,
        mask=_make_decay_mask(params, name_map, run.decayed),
    )
    limit = run.clip
    if limit is None:
        return adamw

    def clip(gradients: PyTree, _: PyTree) -> PyTree:
        scale = jnp.minimum(1, limit / (optax.tree.norm(gradients) + 1e-6))
        return jax.tree.map(lambda x: scale * x, gradients)

    return optax.chain(optax.stateless(clip), adamw)


def _make_decay_mask(params: PyTree, name_map: NameMap, decayed: Collection[str]) -> PyTree:
    """Return True for arrays whose tensors are all in `decayed`, False for those with none in it."""
    decays: dict[int, dict[bool, str]] = {}
    for name, plan in plan_tensors(params, name_map).items():
        for piece in plan.slices:
            decays.setdefault(piece.leaf, {})[name in decayed] = name
    for names in decays.values():
        if len(names) == 2:
            raise ValueError(
                f"{names[True]} decays and {names[False]} does not, but the model has both in one array: pass "
                "optimizer=, with a mask of its own"
            )
    flags = [True in decays[leaf] for leaf in range(len(jax.tree.leaves(params)))]
    return jax.tree.unflatten(jax.tree.structure(params), flags)


def get_moments(state: PyTree) -> tuple[PyTree, PyTree]:
    """Return first and second moments of Adam in the state of an optimizer.

    **Raises** `ValueError` unless one part of the state has both.
    """
    found = [node for node in jax.tree.leaves(state, is_leaf=_has_moments) if _has_moments(node)]
    if len(found) != 1:
        raise ValueError(f"the optimizer has {len(found)} states with mu and nu: expected one, as of optax.adamw")
    return found[0].mu, found[0].nu


def replace_moments(state: PyTree, first: PyTree, second: PyTree) -> PyTree:
    """Return the state of an optimizer with other moments of Adam."""

    def replace(node: Any) -> Any:
        if _has_moments(node):
            return node._replace(mu=first, nu=second)
        return node

    return jax.tree.map(replace, state, is_leaf=_has_moments)


def _has_moments(node: Any) -> bool:
    return hasattr(node, "_replace") and hasattr(node, "mu") and hasattr(node, "nu")
