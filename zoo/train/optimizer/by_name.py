"""Optimizers by their names, for command lines."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from zoo.parallel import Mesh

from .masks import decay_mask
from .muon import muon

OptimizerName = Literal["adamw", "muon", "lion", "schedule_free", "ademamix", "adopt", "prodigy"]


def make_optimizer(
    name: OptimizerName,
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float = 0.0,
    mask: Any = decay_mask,
    b2: float = 0.95,
    mesh: Mesh | None = None,
) -> optax.GradientTransformation:
    """Return the optimizer of optax with this name, or `train.muon`, with decoupled weight decay of the parameters of
    `mask`.

    - adamw (arXiv:1711.05101); muon, with AdamW (`train.muon`), which takes `mesh`.
    - lion (Chen et al., arXiv:2302.06675): a third to a tenth of AdamW's learning rate, and more weight decay.
    - schedule_free (Defazio et al., arXiv:2405.15682): schedule-free AdamW, with a learning rate that does not decay.
      Evaluate and export `train.eval_params(opt_state, model)`.
    - ademamix (Pagliardini et al., arXiv:2409.03137): AdamW with a second, slow momentum.
    - adopt (Taniguchi et al., arXiv:2411.02853): Adam that converges with any b2; it keeps its b2 of 0.9999.
    - prodigy (Mishchenko & Defazio, arXiv:2306.06101) estimates the learning rate: `learning_rate` is a factor of it,
      near 1. It decays all parameters and ignores `mask`.

    **Raises** `ValueError` for another name.
    """
    decay = optax.add_decayed_weights(weight_decay, mask)
    descend = optax.scale_by_learning_rate(learning_rate)

    def make_schedule_free() -> optax.GradientTransformation:
        scale = optax.scale_by_rms(decay=b2, eps_in_sqrt=False, bias_correction=True)  # Adam without a first moment
        return optax.contrib.schedule_free(optax.chain(scale, decay, descend), learning_rate)

    makers: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": lambda: optax.adamw(learning_rate, b2=b2, weight_decay=weight_decay, mask=mask),
        "muon": lambda: muon(learning_rate, mesh=mesh, adam_b2=b2, weight_decay=weight_decay, mask=mask),
        "lion": lambda: optax.lion(learning_rate, weight_decay=weight_decay, mask=mask),
        "schedule_free": make_schedule_free,
        "ademamix": lambda: optax.contrib.ademamix(learning_rate, b2=b2, weight_decay=weight_decay, mask=mask),
        "adopt": lambda: optax.chain(optax.contrib.scale_by_adopt(), decay, descend),
        "prodigy": lambda: _make_prodigy(learning_rate, b2, weight_decay),
    }
    if name not in makers:
        raise ValueError(f"the optimizers are {', '.join(makers)}, not {name!r}")
    return makers[name]()


def _make_prodigy(
    learning_rate: optax.ScalarOrSchedule, b2: float, weight_decay: float
) -> optax.GradientTransformation:
    """Return Prodigy that survives a warmup from 0, and a step that donates both the model and its state."""
    prodigy = optax.contrib.prodigy(learning_rate, (0.9, b2), weight_decay=weight_decay, safeguard_warmup=True)

    def init(params: optax.Params) -> optax.OptState:
        return prodigy.init(jax.tree.map(jnp.copy, params))  # the state keeps the first parameters

    return optax.GradientTransformationExtraArgs(init, prodigy.update)
