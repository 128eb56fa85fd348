"""A teacher that is stored: its k likeliest tokens of every target, computed once before training.

data = store_top_k(teacher, data, 64, mesh, batch_size=8)
for batch in data.train.batches(batch_size=8):
    batch, top_k = split_top_k(batch)
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from zoo._files import user_cache_folder
from zoo.models import Decoder
from zoo.parallel import Mesh
from zoo.parallel.gather import cast
from zoo.parallel.spmd import spmd
from zoo.text.records.records import Records

from .objectives.distillation import TopK, top_k_log_probs
from .stored_arrays import store_arrays

_NAMES = {"teacher_ids": "ids", "teacher_log_probs": "log_probs"}
_VERSION = 2  # raised whenever the format of a store changes, or how its numbers are computed


def store_top_k(
    teacher: Decoder,
    data: Records,
    k: int,
    mesh: Mesh,
    *,
    batch_size: int,
    temperature: float = 1.0,
    vocab: int | None = None,
    dtype: str = "float32",
    cache: str | Path | None = None,
) -> Records:
    """Add to each row of training the teacher's `k` likeliest tokens of each target, 6 bytes each, in one pass.

    With 64 of them, a billion positions take 384 GB. Training needs no teacher then: pass the `TopK` that `split_top_k`
    takes out of a batch to `zoo.train.objectives.distillation_terms`, or its arrays to `distillation_top_k`.

    - `teacher`: placed on `mesh`.
    - `batch_size`: rows at a time, over all processes.
    - `temperature`, `vocab`: as in `zoo.train.objectives.distillation`; the loss takes the same ones.
    - `dtype`: of the computation.
    - `cache`: a folder for the arrays, in subfolders named by hashes of the rows, of the teacher's parameters and
      settings, and of these options. By default `equizoo/teachers` in the user's cache folder. Of a teacher with
      functions or classes of your own, as for `precompute_reference`, they are deleted at the end of the program.

    A pass that ends early leaves nothing to train on. Several processes share the folder.

    **Raises** `ValueError` as `zoo.train.objectives.distillation.top_k_log_probs` does.
    """
    options = {"temperature": temperature, "vocab": vocab}
    find = spmd(partial(_find_top_k, k=k, dtype=dtype, **options), mesh, out=dict.fromkeys(_NAMES, "batch seq top"))
    identity = [_VERSION, k, options, dtype]
    return store_arrays(
        data,
        lambda batch: find(teacher, batch),
        mesh,
        name="teacher",
        model=teacher,
        identity=identity,
        batch_size=batch_size,
        folder=Path(cache or user_cache_folder() / "teachers"),
    )


def split_top_k(
    batch: Mapping[str, Shaped[Any, "batch ..."]],
) -> tuple[dict[str, Shaped[Any, "batch ..."]], TopK]:
    """Return a batch without the arrays of `store_top_k`, and these."""
    rest = {name: x for name, x in batch.items() if name not in _NAMES}
    return rest, TopK(**{field: jnp.asarray(batch[name]) for name, field in _NAMES.items()})


def _find_top_k(
    teacher: Decoder, batch: Mapping[str, Array], *, k: int, dtype: str, **options: Any
) -> dict[str, Array]:
    found = top_k_log_probs(cast(teacher, dtype), batch, k, **options)
    return {name: getattr(found, field) for name, field in _NAMES.items()}
