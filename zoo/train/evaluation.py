"""Mean loss on held-out data."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zoo.parallel import Mesh, reader
from zoo.parallel.batch import place_batch
from zoo.parallel.closures import refuse_closed_over_arrays
from zoo.parallel.gradient import value
from zoo.text.batches import OrderedBatches, bits_per_byte
from zoo.text.run_data import LossUnit


class Evaluation:
    """Mean loss of a model over held-out batches, in bits per byte or in nats per trained token.

        evaluate = Evaluation(loss_fn, mesh, validation=corpus.validation.ordered(seq_len, batch_size, limit=16))
        evaluate(model)  # {"validation": 2.31}

    `loss_fn` is as for `zoo.value`. The mean is over what it counts: tokens with a weight, or pairs of texts. With
    `has_aux` it returns `(total, count), aux`, and an evaluation returns the means and `aux` summed over all batches.
    Batches are placed on the mesh once; each process reads its own rows.

    **Raises** `ValueError` for bits per byte of batches that do not know the bytes of their tokens.
    """

    def __init__(
        self,
        loss_fn: Callable,
        mesh: Mesh,
        *,
        has_aux: bool = False,
        unit: LossUnit = "bits per byte",
        **texts: OrderedBatches,
    ):
        self._unit = unit
        refuse_closed_over_arrays(loss_fn)
        self._loss = value(partial(_add_count, loss_fn, has_aux), mesh, has_aux=True)
        self._has_aux = has_aux
        self._texts = texts
        if unit == "bits per byte":
            for text in texts.values():
                bits_per_byte(0.0, text)  # fails now, not after the first steps, where the bytes are not known
        own = {name: text.with_process(reader(mesh)) for name, text in texts.items()}
        self._batches = {
            name: [place_batch(batch, mesh, vocab=text.vocab) for batch in text] for name, text in own.items()
        }

    def __call__(self, model: PyTree, *rest: Any) -> Any:
        """Return `{name: mean}`, with `has_aux` also the summed `aux`. `rest` are further arguments of `loss_fn`."""
        means = {}
        all_aux = []
        for name, batches in self._batches.items():
            results = jax.device_get([self._loss(model, batch, *rest) for batch in batches])
            all_aux += [aux for _, (_, aux) in results]
            mean = float(np.average([loss for loss, _ in results], weights=[count for _, (count, _) in results]))
            if self._unit == "bits per byte":
                mean = float(bits_per_byte(mean, self._texts[name]))
            means[name] = mean
        if self._has_aux:
            return (means, jax.tree.map(lambda *x: np.sum(x, axis=0), *all_aux))
        return means


def _add_count(loss_fn: Callable, has_aux: bool, *args: Any) -> Any:
    """Call a loss function; return its count in the aux, too, which sums it over devices."""
    result = loss_fn(*args)
    loss, aux = result if has_aux else (result, ())
    return loss, (loss[1], aux)
