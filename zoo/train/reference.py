"""The reference of a preference loss, computed once: log p of every target under a frozen model, kept on the disk.

    data = precompute_reference(model, data, mesh, batch_size=8)    # one pass over all rows, unless they are there
    for batch in data.train.batches(batch_size=8): ...              # with `reference`, "batch seq"

A step then holds no second model, and runs none: 4 bytes for each position of a row take its place.
"""

from functools import partial
from pathlib import Path

import equinox as eqx
from jaxtyping import Array, Float

from zoo._files import user_cache_folder
from zoo.models import Decoder
from zoo.models.log_probs import log_probs
from zoo.parallel import Mesh, leaves
from zoo.parallel.gather import cast
from zoo.parallel.spmd import spmd
from zoo.text.records.records import Records

from .stored_arrays import store_arrays

_VERSION = 2  # raised whenever the format of a store changes, or how its numbers are computed


def precompute_reference(
    model: Decoder,
    data: Records,
    mesh: Mesh,
    *,
    batch_size: int,
    dtype: str = "float32",
    cache: str | Path | None = None,
) -> Records:
    """Add to each row of `data` its `reference`: log p of each target under `model`, float32, 0 without a target.

    - `model`: placed on `mesh`, and frozen: the model that training starts from.
    - `batch_size`: rows at a time, over all processes.
    - `dtype`: of the computation. Take that of training, or the log-ratios begin further from 0.
    - `cache`: a folder for the numbers, in subfolders named by hashes of the rows, of the model's parameters and
      settings, and of `dtype`: another model has another subfolder. By default `equizoo/references` in the user's cache
      folder. Several processes share it. A model with functions or classes of your own, such as an edit of `zoo.patch`,
      cannot be told from another: its numbers are computed in each run, with a line in the log, and deleted at the end.

    A pass that ends early leaves nothing to train on.

    **Raises** `ValueError` for a model with adapters, without which it is the reference.
    """
    if any(leaf.adapter_parameter for leaf in leaves(eqx.filter(model, eqx.is_array))):
        raise ValueError(
            "the reference has adapters, which are trained: pass the model without them, or take "
            "zoo.adapters.remove(model) inside the loss, which needs no pass over the data"
        )
    compute = spmd(partial(_compute_log_probs, dtype=dtype), mesh, out={"reference": "batch seq"})
    return store_arrays(
        data,
        lambda batch: compute(model, batch),
        mesh,
        name="reference",
        model=model,
        identity=[_VERSION, dtype],
        batch_size=batch_size,
        folder=Path(cache or user_cache_folder() / "references"),
        splits=("train", "validation"),
    )


def _compute_log_probs(model: Decoder, batch: dict[str, Array], *, dtype: str) -> dict[str, Float[Array, "batch seq"]]:
    return {"reference": log_probs(cast(model, dtype), batch)}
