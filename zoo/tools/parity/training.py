"""Replay a training run of PyTorch, and name the first step and tensor that differ.

Each step starts from PyTorch's weights and moments, and its update takes PyTorch's gradients. So errors do not
accumulate, and the first comparison out of tolerance says where to look: at the forward pass (loss), the backward pass
(gradients) or the optimizer (moments and weights). A run of our own, from the first weights on, shows the drift.
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
from zoo.parallel.gather import cast
from zoo.parallel.gradient import value_and_grad
from zoo.parallel.mesh import make_mesh
from zoo.parallel.module import trainable
from zoo.parallel.place import place
from zoo.weights.from_torch import from_torch
from zoo.weights.load import load
from zoo.weights.safetensors import CheckpointError, open_tensors
from zoo.weights.save import export_tensors
from zoo.weights.stages import read_name_map

from .adamw import get_moments, make_adamw, replace_moments
from .comparison import GRADIENT_FLOOR, TOLERANCE, Comparison, norm_error
from .stored_run import INITIAL, StepResults, StoredRun, read_run
from .training_report import ComparedStep, TrainingReport

BFLOAT16_TOLERANCE = 0.2
"""Largest error of gradients in bfloat16: PyTorch and JAX round in different places."""
WEIGHT_ROUNDING = 2.0**-23
"""Rounding error of a weight in an update, relative to the weight."""


def compare_training(
    directory: str | Path,
    steps: int | None = None,
    *,
    loss_fn: Callable | None = None,
    optimizer: Any = None,
    family: Family | None = None,
    tolerance: float | None = None,
) -> TrainingReport:
    """Train on the batches of a run that scripts/train_in_torch.py stored, and compare every step: the loss, and under
    the checkpoint's names every gradient, both moments and all weights.

        report = zoo.parity.compare_training("run", 20)
        print(report)
        report.first_failure         # step, phase ("forward", "gradient" or "optimizer") and comparison

    - `steps`: how many steps from the first on. Default: all.
    - `loss_fn`: as for `zoo.value_and_grad`. Default: `zoo.cross_entropy`, in the run's dtype.
    - `optimizer`: an optax optimizer with the moments of Adam. Default: `optax.adamw` with the run's hyperparameters,
      after clipping as PyTorch clips.
    - `family`: as for `zoo.load`.
    - `tolerance`: the largest error of a gradient, by norm; a tenth of it for the loss. Default: 1e-4, and 0.2 for a
      run in bfloat16. Moments, and the distances that weights move in a step, are held to 1e-4 by norm.

    A gradient or moment that is zero but for rounding counts as the rounding error of the largest one; so does the
    update of a weight that rounding keeps in place.

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
    initial = run.directory / INITIAL
    model = load(initial, mesh=mesh, dtype=jnp.float32, family=family)
    assert model.origin is not None  # it was loaded
    name_map = read_name_map(model.origin)
    weights = _name_tensors(trainable(model), name_map)
    _check_parameters(run, weights)
    structure = jax.tree.structure(trainable(model))
    constants = {name: x.read() for name, x in open_tensors(initial).items() if name not in run.parameters}

    def to_tree(tensors: Mapping[str, np.ndarray]) -> PyTree:
        """Return weights, gradients or moments in a tree as of the trainable parameters."""
        read = from_torch({**constants, **tensors}, initial, mesh=mesh, dtype=jnp.float32, family=family)
        return jax.tree.unflatten(structure, jax.tree.leaves(trainable(read)))

    if optimizer is None:
        optimizer = make_adamw(run, trainable(model), name_map)
    compute_gradients = value_and_grad(loss_fn or _make_loss(run.dtype), mesh)

    @eqx.filter_jit
    def update(gradients: PyTree, state: PyTree, model: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = optimizer.update(gradients, state, trainable(model))
        return place(eqx.apply_updates(model, updates), mesh), state

    state = optimizer.init(trainable(model))
    get_moments(state)
    own_model = model
    own_state = state
    compared = []
    for number in range(steps):
        batch, theirs = run.read_step(number)
        with jax.default_matmul_precision("highest"):
            loss, gradients = compute_gradients(model, batch)
            own_loss, own_gradients = compute_gradients(own_model, batch)
        own_model, own_state = update(own_gradients, own_state, own_model)
        model, state = update(to_tree(theirs.gradients), state, model)
        trees = (gradients, *get_moments(state), trainable(model))
        named = [_name_tensors(tree, name_map) for tree in trees]
        ours = StepResults(float(loss), _compute_norm(named[0]), *named)
        drift = norm_error(float(own_loss), theirs.loss)
        compared.append(_compare_step(number, ours, theirs, weights, drift, tolerance))
        weights = theirs.weights
        model = eqx.combine(to_tree(weights), model)
        state = replace_moments(state, to_tree(theirs.first_moments), to_tree(theirs.second_moments))
    return TrainingReport(tuple(compared), stored)


def _compare_step(
    number: int,
    ours: StepResults,
    theirs: StepResults,
    before: Mapping[str, np.ndarray],
    drift: float,
    tolerance: float,
) -> ComparedStep:
    """Compare a step that started from the weights `before`."""
    loss = Comparison("loss", norm_error(ours.loss, theirs.loss), tolerance / 10)
    norm = Comparison("norm of all gradients", norm_error(ours.gradient_norm, theirs.gradient_norm), tolerance)
    backward = dict(reversed(theirs.gradients.items()))
    gradients = _compare_all("gradient", ours.gradients, backward, GRADIENT_FLOOR, tolerance)
    firsts = _compare_all("first moment", ours.first_moments, theirs.first_moments, GRADIENT_FLOOR, TOLERANCE)
    seconds = _compare_all("second moment", ours.second_moments, theirs.second_moments, GRADIENT_FLOOR**2, TOLERANCE)
    weights = _compare_updates(ours.weights, theirs.weights, before)
    return ComparedStep(
        number, theirs.loss, (loss,), (*gradients, norm), (*firsts, *seconds), tuple(weights), drift=drift
    )


def _compare_all(
    kind: str, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], rounding: float, tolerance: float
) -> Iterator[Comparison]:
    """Compare gradients or moments by norm; `rounding` is relative to the largest norm."""
    floor = max(float(np.linalg.norm(x)) for x in theirs.values()) * rounding / tolerance
    for name, x in theirs.items():
        yield Comparison(f"{kind} of {name}", norm_error(ours[name], x, floor), tolerance)


def _compare_updates(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray]
) -> Iterator[Comparison]:
    """Compare how far weights have moved: an error of the optimizer is small beside the weights themselves."""
    for name, x in theirs.items():
        floor = float(np.linalg.norm(x)) * WEIGHT_ROUNDING / TOLERANCE
        yield Comparison(f"update of {name}", norm_error(ours[name] - before[name], x - before[name], floor), TOLERANCE)


def _compute_norm(arrays: Mapping[str, np.ndarray]) -> float:
    """Return the norm of all arrays together."""
    return math.sqrt(sum(float(np.linalg.norm(x)) ** 2 for x in arrays.values()))


def _make_loss(dtype: str) -> Callable:
    def loss_fn(model: PyTree, batch: Mapping[str, Any]) -> Any:
        return cross_entropy(cast(model, dtype), batch)

    return loss_fn


def _name_tensors(tree: PyTree, name_map: NameMap) -> dict[str, np.ndarray]:
    """Return the arrays of a tree of parameters, by their names in the checkpoint."""
    tensors = export_tensors(jax.tree.map(np.asarray, tree), name_map)
    return {name: tensor.read() for name, tensor in tensors.items()}


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
