"""Transformers whose middle layers run several times, initialized from scratch."""

from typing import Any

from jaxtyping import Array, Key

from ..decoder import Decoder
from .transformer import Transformer


def Looped(*, core: int, loops: int, prelude: int = 0, coda: int = 0, key: Key[Array, ""], **options: Any) -> Decoder:
    """Build a Transformer whose `core` layers run `loops` times, one pass after the other, between the `prelude` and
    the `coda` (recurrent depth; Geiping et al., arXiv:2502.05171, section 3). Without these two all layers are looped
    (Universal Transformer; Dehghani et al., arXiv:1807.03819; ALBERT).

        model = zoo.models.Looped(vocab=256, embed=128, heads=4, mlp=384, prelude=1, core=2, coda=1, loops=4, key=key)

    - `options`: of `Transformer`, except `layers` and `order`.

    The parameters of the core exist once, as `shared.*`, and their gradient is the sum over the passes. Each pass has
    its own states in decoding, dropout, and layer numbers: of the 10 layers of this model, `zoo.capture` names the core
    in its second pass `layers.3` and `layers.4`. Names and shapes of the arrays do not depend on `loops`: a model takes
    the parameters of one with other loops.

    What the papers have besides is not here: the output of the prelude as an input of each pass, and a random first
    state (arXiv:2502.05171); embeddings of the pass, and halting per position (arXiv:1807.03819).

    **Raises** `ValueError` for a core without layers or loops, and as `Transformer` does. The model raises
    `NotImplementedError` on a mesh with a pipeline, and with `loop="ahead"`.
    """
    if core < 1 or loops < 1 or prelude < 0 or coda < 0:
        raise ValueError(f"a core of 1 layer or more runs once or more: {prelude=}, {core=}, {coda=}, {loops=}")
    layers = prelude + core + coda
    numbers = range(layers)
    end = prelude + core
    order = (*numbers[:prelude], *loops * [*numbers[prelude:end]], *numbers[end:])
    return Transformer(layers=layers, order=order, **options, key=key)
