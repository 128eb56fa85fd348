"""Replay a training run of PyTorch, and name the first step and tensor that differ.

A step is compared in the order in which it computes: loss, gradients, then moments and weights after the update. The
first of them out of tolerance says where to look, since everything before it agrees: in the forward pass, in the
backward pass, or in the optimizer.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from zoo._optional import require_installed
from zoo.models.hf.errors import suggest_nearest
from zoo.models.hf.spec import Family, NameMap
from zoo.models.loss import cross_entropy
from zoo.parallel import cast, make_mesh, place, trainable, value_and_grad
from zoo.weights.load import load
from zoo.weights.plan import plan_tensors
from zoo.weights.safetensors import CheckpointError
from zoo.weights.save import export_tensors, read_name_map

from .report import GRADIENT_FLOOR, TOLERANCE, Comparison, norm_error
from .stored_run import INITIAL, StepResults, StoredRun, read_run
from .training_report import ComparedStep, TrainingReport

BFLOAT16_TOLERANCE = 0.25
"""Largest error of gradients, moments and weights in bfloat16: PyTorch and JAX round in different places."""
WEIGHT_ROUNDING = 2.0**-22
"""Rounding errors of weights after some steps, relative to their norm."""


def compare_training(
    directory: str | Path,
    steps: int | None = None,
    *,
    loss_fn: Callable | None = None,
    optimizer: Any = None,
    family: Family | None = None,
    tolerance: float | None = None,
) -> TrainingReport:
    """Train on the batches of a run that scripts/train_in_torch.py stored, from its first weights, and compare every
    step: the loss, and under the checkpoint's names every gradient, both moments and all weights.

        report = zoo.parity.compare_training("run", 20)
        print(report)
        report.first_failure         # step, phase ("forward", "gradient" or "optimizer") and comparison

    - `steps`: how many steps from the first on. Default: all.
    - `loss_fn`: as for `zoo.value_and_grad`. Default: `zoo.cross_entropy`, in the run's dtype.
    - `optimizer`: an optax optimizer with the moments of Adam. Default: `optax.adamw` with the run's hyperparameters,
      after clipping as PyTorch clips.
    - `family`: as for `zoo.load`.
    - `tolerance`: the largest error of gradients and moments, by norm, and of weights, by the distance that they have
      moved; a tenth of it for the loss. Default: 1e-4, and 0.25 for a run in bfloat16.

    A gradient or moment that is zero but for rounding counts as the rounding error of the largest one.

    **Raises** `CheckpointError` for a run that is damaged or has fewer steps, and for parameters that the model lacks;
    `ValueError` for an optimizer without moments, and if layers that are stacked in one array differ in weight decay;
    `MissingExtraError` without optax.
    """
    require_installed("optax", extra="train")
    run = read_run(directory)
    stored = len(run.learning_rates)
    if steps is None:
        steps = stored
    if not 1 <= steps <= stored:
        raise CheckpointError(f"{run.directory} has {stored} steps: steps should be from 1 to {stored}, and is {steps}")
    if tolerance is None:
        tolerance = TOLERANCE if run.dtype == "float32" else BFLOAT16_TOLERANCE
    mesh = make_mesh(devices=jax.devices()[:1])
    model = load(run.directory / INITIAL, mesh=mesh, dtype=jnp.float32, family=family)
    assert model.origin is not None  # it was loaded
    name_map = read_name_map(model.origin)
    initial = _name_tensors(trainable(model), name_map)
    _check_parameters(run, initial)
    if optimizer is None:
        optimizer = _make_optimizer(run, _make_decay_mask(trainable(model), name_map, run.decayed))
    gradient = value_and_grad(loss_fn or _make_loss(run.dtype), mesh)
    state = optimizer.init(trainable(model))
    _find_moments(state)

    @eqx.filter_jit
    def train_step(model: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        loss, gradients = gradient(model, batch)
        updates, state = optimizer.update(gradients, state, trainable(model))
        return place(eqx.apply_updates(model, updates), mesh), state, loss, gradients

    compared = []
    for number in range(steps):
        batch, theirs = run.read_step(number)
        with jax.default_matmul_precision("highest"):
            model, state, loss, gradients = train_step(model, state, jax.tree.map(jnp.asarray, batch))
        trees = (gradients, *_find_moments(state), trainable(model))
        named = [_name_tensors(tree, name_map) for tree in trees]
        ours = StepResults(float(loss), _compute_norm(named[0]), *named)
        compared.append(_compare_step(number, ours, theirs, initial, tolerance))
    return TrainingReport(tuple(compared), stored)


def _compare_step(
    number: int, ours: StepResults, theirs: StepResults, initial: Mapping[str, np.ndarray], tolerance: float
) -> ComparedStep:
    loss = Comparison("loss", norm_error(ours.loss, theirs.loss), tolerance / 10)
    norm = Comparison("norm of all gradients", norm_error(ours.gradient_norm, theirs.gradient_norm), tolerance)
    gradients = _compare("gradient", ours.gradients, theirs.gradients, GRADIENT_FLOOR, tolerance)
    firsts = _compare("first moment", ours.first_moments, theirs.first_moments, GRADIENT_FLOOR, tolerance)
    seconds = _compare("second moment", ours.second_moments, theirs.second_moments, GRADIENT_FLOOR**2, tolerance)
    weights = _compare_weights(ours.weights, theirs.weights, initial, tolerance)
    return ComparedStep(number, theirs.loss, (loss,), (*gradients, norm), (*firsts, *seconds), tuple(weights))


def _compare(
    kind: str, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], rounding: float, tolerance: float
) -> Iterator[Comparison]:
    """Compare gradients or moments by norm; `rounding` is relative to the largest norm."""
    floor = max(float(np.linalg.norm(x)) for x in theirs.values()) * rounding / tolerance
    for name, x in theirs.items():
        yield Comparison(f"{kind} of {name}", norm_error(ours[name], x, floor), tolerance)


def _compare_weights(
    ours: Mapping[str, np.ndarray],
    theirs: Mapping[str, np.ndarray],
    initial: Mapping[str, np.ndarray],
    tolerance: float,
) -> Iterator[Comparison]:
    """Compare the distances that weights have moved, which shows an error that is small beside the weights."""
    for name, x in theirs.items():
        floor = float(np.linalg.norm(x)) * WEIGHT_ROUNDING / tolerance
        error = norm_error(ours[name] - initial[name], x - initial[name], floor)
        yield Comparison(f"weight {name}", error, tolerance)


def _compute_norm(arrays: Mapping[str, np.ndarray]) -> float:
    """Return the norm of all arrays together."""
    return math.sqrt(sum(float(np.linalg.norm(x)) ** 2 for x in arrays.values()))


def _make_loss(dtype: str) -> Callable:
    def loss_fn(model: PyTree, batch: Mapping[str, Any]) -> Any:
        return cross_entropy(cast(model, dtype), batch)

    return loss_fn


def _make_optimizer(run: StoredRun, mask: PyTree) -> Any:
    """Return `torch.optim.AdamW` after `torch.nn.utils.clip_grad_norm_`, which adds 1e-6 to the norm."""
    import optax

    rates = jnp.asarray(run.learning_rates)
    adamw = optax.adamw(lambda step: rates[step], run.b1, run.b2, run.eps, weight_decay=run.weight_decay, mask=mask)
    limit = run.clip
    if limit is None:
        return adamw

    def clip(gradients: PyTree, _: PyTree) -> PyTree:
        scale = jnp.minimum(1, limit / (optax.global_norm(gradients) + 1e-6))
        return jax.tree.map(lambda x: scale * x, gradients)

    return optax.chain(optax.stateless(clip), adamw)


def _make_decay_mask(params: PyTree, name_map: NameMap, decayed: list[str]) -> PyTree:
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


def _find_moments(state: PyTree) -> tuple[PyTree, PyTree]:
    """Return first and second moments of Adam in the state of an optimizer."""
    has_moments = lambda node: hasattr(node, "mu") and hasattr(node, "nu")
    found = [node for node in jax.tree.leaves(state, is_leaf=has_moments) if has_moments(node)]
    if len(found) != 1:
        raise ValueError(
            f"the optimizer has {len(found)} states with mu and nu, where one was expected, as of optax.adamw"
        )
    return found[0].mu, found[0].nu


def _name_tensors(tree: PyTree, name_map: NameMap) -> dict[str, np.ndarray]:
    """Return the arrays of a tree of parameters, by their names in the checkpoint."""
    specs, assemble_tensor = export_tensors(jax.tree.map(np.asarray, tree), name_map)
    return {name: assemble_tensor(name) for name in specs}


def _check_parameters(run: StoredRun, ours: Mapping[str, np.ndarray]) -> None:
    """**Raises** `CheckpointError` unless the run and the model have the same parameters."""
    for name, shape in run.parameters.items():
        if name not in ours:
            raise CheckpointError(
                f"the run has a parameter {name}, which the model in {run.directory / INITIAL} has not"
                f"{suggest_nearest(name, ours)}"
            )
        if list(ours[name].shape) != shape:
            raise CheckpointError(f"{name} is {shape} in the run, and {list(ours[name].shape)} in the model")
    if more := sorted(ours.keys() - run.parameters.keys()):
        raise CheckpointError(f"the model has a parameter {more[0]}, which the run has not trained")
