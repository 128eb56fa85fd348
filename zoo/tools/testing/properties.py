"""Properties of a sequence model on one device: causality, padding, packing, states, implementations, gradients.

The reference is the outputs of each document by itself. Few programs are compiled: one reads documents, one reads
packed rows with gradients, one extends a state for each size of a piece, and one for each further implementation.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zoo.layers import TokenInfo
from zoo.ops.implementations import ObstacleError
from zoo.parallel.gather import cast
from zoo.parallel.module import trainable
from zoo.parallel.taps import Taps, active_taps
from zoo.parallel.tokens import merge_copies

from .checks import (
    ROUNDING,
    TOLERANCE,
    Check,
    Difference,
    compare_gradients,
    compare_tokens,
    find_worst,
    flaw,
    join_flaws,
    run_checks,
)
from .subject import Subject, list_divergences, list_trainable_names, set_implementation
from .texts import Texts

_Batch = dict[str, np.ndarray]
_Gradients = tuple[Any, Any, Subject]
"""Outputs, and gradients with respect to the input and to the parameters."""


@eqx.filter_jit
def read(subject: Subject, x: Any) -> Any:
    """Return the outputs of one document per row."""
    return subject(x, TokenInfo())[0]


def compute_loss(subject: Subject, x: Any, batch: Any) -> tuple[Any, Any]:
    """Return the outputs of packed rows, weighted and summed, and the number of weights. `x` is an argument of its own:
    `zoo.place_batch` shards its tokens."""
    return _sum_weighted(subject, x, batch)[0], jnp.float32(batch["weights"].size)


def _sum_weighted(subject: Subject, x: Any, batch: Any) -> tuple[Any, Any]:
    """Return the sum of outputs times weights, and the outputs. Outputs of weight 0, as of padding, do not count, even
    if they are not finite.

    Indexers of sparse attention change no output smoothly. The gradient of the sum has theirs from the divergences by
    which they learn, which add 0 to it.
    """
    info = TokenInfo(batch["positions"], batch["segment_ids"])
    taps = Taps(list_divergences(subject))
    with active_taps(taps if taps.reads else None):
        y, _ = subject(x, info)
    total = (jnp.where(batch["weights"] == 0, 0, y) * batch["weights"]).sum()
    for values, _ in taps.collect().values():
        divergence = merge_copies(values).sum()
        total += divergence - lax.stop_gradient(divergence)
    return total, y


@eqx.filter_jit
def read_packed(subject: Subject, batch: Any) -> _Gradients:
    """Return the outputs of packed rows, and the gradients of `compute_loss` with respect to x and the parameters."""

    def compute(parameters, x):
        return _sum_weighted(eqx.combine(parameters, subject), x, batch)

    (by_parameters, by_x), y = jax.grad(compute, (0, 1), has_aux=True)(trainable(subject), batch["x"])
    return y, by_x, by_parameters


@eqx.filter_jit
def extend(subject: Subject, x: Any, positions: Any, state: Any) -> tuple[Any, Any]:
    """Return the outputs of further tokens, and the updated state."""
    return subject(x, TokenInfo(positions), state)


def check_properties(
    subject: Subject, texts: Texts, implementations: Sequence[tuple[str, Any, str]], reason: str
) -> Iterator[Check]:
    """Yield the checks that need only one device. `reason`: why there are no implementations to compare.

    An error in reading documents or packed rows is raised, since nothing else can be checked then.
    """
    alone = np.asarray(read(subject, texts.first))
    batch = texts.packed | {"weights": texts.draw_weights(alone.shape[-1])}
    expected = jax.device_get(read_packed(subject, batch))
    yield from _check_rows(subject, texts, alone)
    yield from _check_packed(subject, texts, alone)
    yield from run_checks("decode = read", "outputs through a state", partial(_check_states, subject, texts, alone))
    yield _check_gradients(subject, expected)
    yield from run_checks("dtype", "dtypes", partial(check_dtypes, subject, texts))
    if not implementations:
        yield Check("modes agree", "", cause=reason)
    for name, value, obstacle in implementations:
        if obstacle:
            yield Check("modes agree", "", cause=f"{name}={_format_value(value)}: {obstacle}")
            continue
        compare = partial(_check_implementation, subject, batch, expected, name, value)
        yield from run_checks("modes agree", f"{name}={_format_value(value)}", compare)


def _check_rows(subject: Subject, texts: Texts, alone: np.ndarray) -> Iterator[Check]:
    """Replace half of the rows, and check that the other rows have the same outputs."""
    half = texts.rows // 2
    mixed = read(subject, np.concatenate([texts.first[:half], texts.second[half:]]))
    difference = compare_tokens(np.asarray(mixed)[:half], alone[:half])
    cause = "A mean, a norm or a sort is over the batch dim."
    yield Check("rows separate", "outputs of a row, with one or the other row beside it", difference, cause=cause)


def _check_packed(subject: Subject, texts: Texts, alone: np.ndarray) -> Iterator[Check]:
    """Compare packed documents with the same documents by themselves, and find by gradient the tokens that each output
    depends on."""
    batch = texts.packed | {"weights": texts.draw_diagonal_weights(alone.shape[-1])}
    y, by_x, _ = jax.device_get(read_packed(subject, batch))
    segments = texts.segment_ids
    influence = np.abs(by_x).max(-1)
    own = np.pad(np.diagonal(segments), (0, texts.rows - texts.packed_len))[:, None]
    is_later = np.arange(texts.packed_len) > np.arange(texts.rows)[:, None]

    def find_leak(mask: np.ndarray) -> Difference:
        masked = np.where(mask & (own > 0), influence, 0)
        row, token = np.unravel_index(np.argmax(masked), masked.shape)
        error = float(masked[row, token] / max(influence.max(), 1e-30))
        return Difference(error, f"the output at token {row} of row {row} depends on token {token}")

    cause = "A mask, a shift or the padding of a convolution lets later tokens in."
    leak = find_leak(is_later & (segments == own))
    yield Check("causal", "gradients with respect to later tokens, and 0", leak, ROUNDING, cause)

    cause = "Padding is a segment of its own, 0, and nothing of it reaches another one; its own outputs are finite."
    leak = find_leak(segments == 0)
    yield Check("padding", "gradients with respect to padding, and 0", leak, ROUNDING, cause)
    first, second = (texts.unpack(y, segment) for segment in (1, 2))
    is_padded = np.broadcast_to(texts.padding[:, None] > 0, first.shape[:2])
    worst = find_worst([compare_tokens(first, alone, is_padded, of="the document's output"), _find_not_finite(y)])
    yield Check("padding", "outputs behind padding, and without", worst, cause=cause)

    cause = "The state, the convolution or the mask goes on over the start of a segment (info.segment_ids)."
    leak = find_leak((segments > 0) & (segments != own))
    yield Check("packed = separate", "gradients with respect to other documents, and 0", leak, ROUNDING, cause)
    others = np.asarray(read(subject, texts.second))
    worst = find_worst(
        [
            compare_tokens(first, alone, ~is_padded, of="the first document's output"),
            compare_tokens(second, others, of="the second document's output"),
        ]
    )
    yield Check("packed = separate", "outputs of packed documents, and of each by itself", worst, cause=cause)


def _check_states(subject: Subject, texts: Texts, alone: np.ndarray) -> Iterator[Check]:
    """Feed the prompts to a state in pieces and token by token. Some rows are padded on the left."""
    size = (texts.seq_len - 1) // 2
    ones = (1,) * texts.seq_len
    runs = {
        "pieces = whole": (
            "outputs in pieces through a state, and of one pass",
            (size, 1, size, *ones[2 * size + 1 :]),
        ),
        "decode = read": ("outputs of one token at a time through a state, and of one pass", ones),
    }
    is_real = texts.prompt_positions >= 0
    expected = texts.pad(alone)
    is_padded = (texts.padding > 0)[:, None]
    behind = []
    for name, (compared, pieces) in runs.items():
        y = run_pieces(partial(extend, subject), subject.init_state(texts.rows, texts.seq_len), texts, pieces)
        difference = compare_tokens(y, expected, is_real & ~is_padded)
        cause = "The returned state is not that after the last token, or positions are counted from the piece's start."
        yield Check(name, compared, difference, cause=cause)
        if difference.error <= TOLERANCE:  # otherwise padding is not what is wrong
            of = f"with pieces of {pieces[0]}, the output"
            behind += [compare_tokens(y, expected, is_real & is_padded, of=of), _find_not_finite(y)]
    if behind:
        cause = (
            "Negative positions are padding before a prompt: they leave the state as it was, and no token reads them."
        )
        yield Check("padding", "outputs through a state behind padding, and without", find_worst(behind), cause=cause)


def run_pieces(extend: Callable, state: Any, texts: Texts, pieces: Sequence[int]) -> np.ndarray:
    """Feed the prompts to a state in pieces of these sizes; return all outputs."""
    outputs = []
    start = 0
    for size in pieces:
        part = slice(start, start + size)
        y, state = extend(texts.prompt[:, part], texts.prompt_positions[:, part], state)
        outputs.append(np.asarray(y))
        start += size
    return np.concatenate(outputs, axis=1)


def _find_not_finite(y: np.ndarray) -> Difference:
    """Return an infinite difference where an output, including outputs of padding, is not a finite number."""
    rows, positions = np.nonzero(~np.isfinite(y).all(-1))
    if not len(rows):
        return Difference(0.0, "")
    return flaw(f"the output at row {rows[0]}, position {positions[0]} is not finite, and the next layer reads it")


def _check_gradients(subject: Subject, results: _Gradients) -> Check:
    """Find parameters whose gradient is not finite, or exactly zero."""
    _, by_x, by_parameters = results
    if np.isfinite(by_x).all():
        places = []
    else:
        places = ["the gradient of the input is not finite"]
    for name, gradient in zip(list_trainable_names(subject), jax.tree.leaves(by_parameters), strict=True):
        if not np.isfinite(gradient).all():
            places.append(f"the gradient of {name} is not finite")
        elif not gradient.any():
            places.append(f"the gradient of {name} is 0 everywhere")
    cause = "A parameter that no output uses, a stop_gradient, or a constant that should be a static field or a buffer."
    return Check("gradients", "gradients of all parameters, finite and not 0", join_flaws(places), cause=cause)


def check_dtypes(subject: Subject, texts: Texts) -> Iterator[Check]:
    """Trace a prefill and a step in float32 and bfloat16: outputs have the input's dtype, states keep theirs."""
    places = []
    for dtype in (jnp.float32, jnp.bfloat16):
        model = eqx.filter_eval_shape(cast, subject, dtype)
        state = eqx.filter_eval_shape(_init_state, model, texts.rows, texts.seq_len, dtype)
        before = _list_types(state)
        for size in (texts.seq_len - 1, 1):
            x = jax.ShapeDtypeStruct((texts.rows, size, texts.embed), dtype)
            positions = jax.ShapeDtypeStruct((texts.rows, size), jnp.int32)
            y, state = eqx.filter_eval_shape(extend, model, x, positions, state)
            if y.dtype != dtype:
                places.append(f"outputs of {jnp.dtype(dtype).name} inputs are {y.dtype.name}")
            if changed := sorted(_list_types(state) - before):
                places.append(f"the state has {changed[0]} after a call with {jnp.dtype(dtype).name}, not before")
    cause = "Cast the output to x.dtype, and return a state of the shapes and dtypes of init_state."
    yield Check("dtype", "dtypes of inputs, outputs and states", join_flaws(places), cause=cause)


def _init_state(subject: Subject, rows: int, length: int, dtype: Any) -> Any:
    return subject.init_state(rows, length, dtype)


def _list_types(state: Any) -> set[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return {f"{jax.tree_util.keystr(path)} {x.dtype.name}{list(x.shape)}" for path, x in paths}


def _check_implementation(
    subject: Subject, batch: _Batch, expected: _Gradients, name: str, value: Any
) -> Iterator[Check]:
    """Compare outputs and gradients of the packed rows with another implementation, if it can compute them here."""
    try:
        results = jax.device_get(read_packed(set_implementation(subject, name, value), batch))
    except ObstacleError as error:
        yield Check("modes agree", "", cause=str(error))
        return
    y, by_x, by_parameters = results
    expected_y, expected_by_x, expected_by_parameters = expected
    names = list_trainable_names(subject)
    worst = find_worst(
        [
            compare_tokens(y, expected_y, batch["segment_ids"] > 0),
            compare_gradients(["the input"], [by_x], [expected_by_x]),
            compare_gradients(names, *(jax.tree.leaves(tree) for tree in (by_parameters, expected_by_parameters))),
        ]
    )
    own = _format_value(getattr(subject.module, name))
    compared = f"outputs and gradients with {name}={_format_value(value)}, and with {own}"
    cause = "One of the two is not the layer's equation: compare them as functions of arrays."
    yield Check("modes agree", compared, worst, 2 * TOLERANCE, cause)


def _format_value(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)
