"""Check that a mesh changes nothing: loss, every gradient and decoding on a mesh equal the results on one device."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from zoo.layers import TokenInfo
from zoo.parallel import Mesh
from zoo.parallel.gradient import value_and_grad
from zoo.parallel.mesh import make_mesh
from zoo.parallel.place import place
from zoo.parallel.spmd import spmd

from .checks import TOLERANCE, Check, Difference, compare_gradients, compare_tokens, find_worst, run_checks
from .properties import compute_loss, extend, read, read_packed, run_pieces
from .subject import Subject, list_trainable_names
from .texts import Texts

_logger = logging.getLogger("zoo")

_NAME = "mesh = one device"
_CAUSE = "A sum or mean over a sharded dim lacks zoo.parallel.reduce, or a size is stored and not read off an array."
_AXES = ("data", "fsdp", "tensor")


def choose_meshes() -> list[Mesh]:
    """Return a mesh with data, fsdp and tensor of 2, as far as there are devices; none for a single device."""
    axes = _AXES[3 - int(math.log2(min(jax.device_count(), 8))) :]
    if not axes:
        return []
    return [_make_mesh(dict.fromkeys(axes, 2))]


def _make_mesh(sizes: dict[str, int], layout: Any = None) -> Mesh:
    """Make a mesh of these sizes over the first devices."""
    devices = jax.devices()[: math.prod(sizes.values())]
    return make_mesh(**{"data": 1, **sizes}, devices=devices, layout=layout)


def count_row_shards(meshes: Sequence[Mesh]) -> int:
    """Return a number of rows that every mesh divides."""
    return math.lcm(8, *(mesh.count_shards("batch") for mesh in meshes))


def count_seq_shards(meshes: Sequence[Mesh]) -> int:
    """Return a number of tokens that every mesh divides."""
    return math.lcm(*(mesh.count_shards("seq") for mesh in meshes))


def check_meshes(subject: Subject, texts: Texts, meshes: Sequence[Mesh]) -> Iterator[Check]:
    """Yield two checks per mesh, or one that says that there is no mesh."""
    if not meshes and jax.device_count() == 1:
        reason = "one device; run with XLA_FLAGS=--xla_force_host_platform_device_count=8 for eight virtual ones"
        _logger.warning("zoo.tools.testing: %s is not checked: %s", _NAME, reason)
        yield Check(_NAME, "", cause=reason)
    elif not meshes:
        yield Check(_NAME, "", cause="meshes=() was passed")
    for mesh in meshes:
        checks = [*_check_training(subject, texts, mesh)]
        if all(check.passed for check in checks):
            yield from checks
        else:
            yield from _blame_axes(subject, texts, mesh, checks)
        compared = f"decoding on {mesh}, and on one device"
        yield from run_checks(_NAME, compared, partial(_compare_decoding, subject, texts, mesh, compared))


def _check_training(subject: Subject, texts: Texts, mesh: Mesh) -> Iterator[Check]:
    compared = f"loss and gradients on {mesh}, and on one device"
    return run_checks(_NAME, compared, partial(_compare_training, subject, texts, mesh, compared))


def _compare_training(subject: Subject, texts: Texts, mesh: Mesh, compared: str) -> Iterator[Check]:
    weights = texts.draw_weights(read(subject, texts.first).shape[-1])
    batch = texts.packed | {"weights": weights}
    y, _, by_parameters = jax.device_get(read_packed(subject, batch))
    terms = np.where(weights == 0, 0, y) * weights
    loss, gradients = jax.device_get(value_and_grad(compute_loss, mesh)(place(subject, mesh), batch["x"], batch))
    # Terms have both signs, so that the loss is small, but not its error.
    by_loss = Difference(float(abs(loss - terms.mean()) / max(np.abs(terms).mean(), 1e-30)), "the loss")
    expected = [np.asarray(x) / terms.size for x in jax.tree.leaves(by_parameters)]
    by_name = compare_gradients(list_trainable_names(subject), jax.tree.leaves(gradients), expected)
    yield Check(_NAME, compared, find_worst([by_loss, by_name]), 2 * TOLERANCE, _CAUSE)


def _blame_axes(subject: Subject, texts: Texts, mesh: Mesh, checks: list[Check]) -> Iterator[Check]:
    """Yield the checks of a mesh and, if it has several axes, the failed checks of each axis by itself."""
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    found = []
    if len(sizes) > 1:
        for axis, size in sizes.items():
            found += _check_training(subject, texts, _make_mesh({axis: size}, mesh.layout))
    yield from [check for check in found if not check.passed] or checks


def _prefill_and_decode(subject: Subject, rows: Mapping[str, Any]) -> Any:
    """Return the output of the last token: all tokens before it are read as one piece, then the token itself. Every
    device that shares the sequence has these tokens, and a share of the caches."""
    x = rows["x"]
    positions = rows["places"]
    state = subject.init_state(x.shape[0], x.shape[1])
    _, state = subject(x[:, :-1], TokenInfo(positions[:, :-1]), state)
    return subject(x[:, -1:], TokenInfo(positions[:, -1:]), state)[0]


def _compare_decoding(subject: Subject, texts: Texts, mesh: Mesh, compared: str) -> Iterator[Check]:
    pieces = ((texts.seq_len - 1) // 2, 1)
    x, positions = (array[:, : sum(pieces)] for array in (texts.prompt, texts.prompt_positions))
    state = subject.init_state(texts.rows, x.shape[1])
    expected = run_pieces(partial(extend, subject), state, texts, pieces)[:, -1:]
    rows = {"x": x, "places": positions}  # names that have no tokens to shard
    actual = spmd(_prefill_and_decode, mesh, out="batch new embed")(place(subject, mesh), rows)
    difference = compare_tokens(actual, expected, positions[:, -1:] >= 0)
    yield Check(_NAME, compared, difference, cause=f"{_CAUSE} Or a dim of the state is not named as the parameters'.")
