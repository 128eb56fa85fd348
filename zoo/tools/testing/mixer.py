"""Check a sequence mixer, a block or a decoder in one call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Key

from zoo.models.factories import check_factory
from zoo.parallel import Mesh
from zoo.parallel.module import is_trainable, map_leaves

from .checks import CheckReport
from .meshes import check_meshes, choose_meshes, count_row_shards, count_seq_shards
from .properties import check_properties
from .subject import MixerSubject, Subject, find_embed_size, list_implementations, make_subject
from .texts import MOST_PADDING, Texts

_DEVIATION = 0.1


def check_mixer(
    make: Callable[..., Any],
    *,
    embed: int | None = None,
    seq_len: int = 6,
    implementations: Mapping[str, Sequence[Any]] | None = None,
    meshes: Sequence[Mesh] | None = None,
    key: Key[Array, ""] | None = None,
) -> CheckReport:
    """Check a mixer, a block or a decoder, and return a report of the largest differences, which `print` shows.

    Names of the checks:

    - `causal`: no output depends on a later token, by gradient.
    - `rows separate`: no row depends on another one.
    - `padding`: padding changes no output, whatever finite numbers it holds, and its own outputs are finite. Without a
      state it is segment 0, left or right; with one it has negative positions, on the left.
    - `packed = separate`: documents of a packed row have the same outputs as by themselves, and no gradient between
      them.
    - `pieces = whole`, `decode = read`: through a state, in pieces or by one token, outputs equal the outputs of one
      pass.
    - `gradients`: the gradient of every trainable parameter is finite, and not 0 everywhere; of an indexer of sparse
      attention, the gradient of its divergence.
    - `dtype`: bfloat16 in, bfloat16 out; a call leaves shapes and dtypes of the state as they were.
    - `modes agree`: every implementation gives the same outputs and gradients.
    - `mesh = one device`: loss, gradients and decoding on a mesh equal the results on one device.

    Arguments:

    - `make`: called with `key=`, as `build_decoder` calls a factory of mixers. Small sizes will do: most of the time is
      compilation. Parameters are checked after a small random change, since parameters initialized to 0 or 1 hide
      errors.
    - `embed`: size of the hidden states. Default: the size of a parameter's dim `embed`.
    - `seq_len`: tokens of a document. Choose more than a chunk or a window has, to check across their borders.
    - `implementations`: further values of each `implementation_option()`, `{"scan": [recurrent_scan]}`. An option of an
      operation, such as attention or a recurrence, or of a `Literal` is checked with all its values by default; values
      that cannot be computed here are listed with the reason.
    - `meshes`: default: data, fsdp and tensor of 2, as far as there are devices. With one device, meshes are not
      checked; the report and the log say so.

    **Raises** `AssertionError` with one line for each check that failed: what was compared, the largest difference
    relative to the largest number, where it is, and its usual cause. `TypeError` and `ValueError` for arguments that
    cannot be checked.
    """
    if seq_len <= MOST_PADDING + 1:
        raise ValueError(f"seq_len={seq_len}: a document has {MOST_PADDING + 2} tokens or more, to be padded")
    check_factory("make", make)
    if key is None:
        key = jax.random.key(0)
    subject = make_subject(eqx.filter_jit(make)(key=key))
    report = check_subject(_perturb(subject), embed, seq_len, implementations or {}, meshes)
    report.raise_failures()
    return report


def check_subject(
    subject: Subject,
    embed: int | None,
    seq_len: int,
    implementations: Mapping[str, Sequence[Any]],
    meshes: Sequence[Mesh] | None,
) -> CheckReport:
    """Run all checks of a subject. A property that does not hold is a failed check, not an error."""
    meshes = choose_meshes() if meshes is None else list(meshes)
    size = find_embed_size(subject) if embed is None else embed
    texts = Texts(seq_len, size, count_row_shards(meshes), count_seq_shards(meshes))
    reason = "the mixers of a block or a decoder are checked by themselves"
    others = []
    if isinstance(subject, MixerSubject):
        others = list(list_implementations(subject.module, implementations))
        reason = "no other implementation is known; name them with implementations="
    with jax.default_matmul_precision("highest"):
        checks = [*check_properties(subject, texts, others, reason), *check_meshes(subject, texts, meshes)]
    return CheckReport(type(subject.module).__name__, tuple(checks))


def _perturb(subject: Subject) -> Subject:
    """Add normal numbers of a small deviation to every trainable parameter."""
    rng = np.random.default_rng(0)

    def add(leaf, x):
        if not is_trainable(leaf, x):
            return x
        noise = _DEVIATION * rng.normal(size=x.shape)
        return x + jax.numpy.asarray(noise, x.dtype)

    return map_leaves(add, subject)
