"""How far a model is from PyTorch's, layer by layer: what to look at while a family is being ported.

Every layer is measured twice: from the tokens on, as errors add up, and by itself, fed with PyTorch's own input to it.
The second names the layer that is wrong, and not those after it.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo.layers import TokenInfo
from zoo.models import Decoder, Hidden
from zoo.models.hf.spec import Family
from zoo.models.parameter_paths import to_snake_case
from zoo.models.scoring import hidden_states, score, unstack_blocks
from zoo.parallel import trainable

from .load import load
from .packed import BLOCKS_SUFFIX
from .plan import plan
from .safetensors import CheckpointError, open_safetensors
from .save import export_tensors, read_name_map

TOLERANCE = 1e-4
"""Of activations and logits, of the largest number in the array. Gradients have twice that, by norm."""
GRADIENT_FLOOR = 1e-7
"""Of the largest gradient: what is left of one that is zero, such as that of a router whose one weight is always 1."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One thing compared."""

    name: str
    error: float
    """The largest difference, of the largest number that was expected; of gradients, the norm of the difference."""
    tolerance: float
    own: float | None = None
    """The same of one layer alone, fed with what PyTorch's was fed with."""
    bfloat16: float | None = None
    """The same in bfloat16, against PyTorch in float32."""
    theirs: float | None = None
    """PyTorch's own error in bfloat16."""

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance and (self.own is None or self.own <= self.tolerance)


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What was compared, in the order in which it is computed."""

    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return all(line.passed for line in self.comparisons)

    @property
    def first_failure(self) -> Comparison | None:
        """Where to look: the first layer that is wrong by itself, or else the first thing out of tolerance."""
        alone = [line for line in self.comparisons if line.own is not None and not line.own <= line.tolerance]
        return next(iter([*alone, *(line for line in self.comparisons if not line.passed)]), None)


def compare(
    directory: str | Path,
    expected: Mapping[str, np.ndarray],
    *,
    gradient_norms: Mapping[str, float] | None = None,
    tolerance: float = TOLERANCE,
    family: Family | None = None,
    packed: bool = False,
) -> ParityReport:
    """Our model of a directory against what PyTorch computed.

    - `expected`: `input_ids`; and of `logits`, `loss`, `hidden_states.N`, `router_logits.N` (of the N-th layer that has
      a router, "tokens experts"), `grad.NAME` whatever there is. Of PyTorch in bfloat16, `bfloat16.logits` and
      `bfloat16.hidden_states.N`.
    - `norms`: of the gradient of the loss, by the checkpoint's names. That of a matrix in MXFP4 goes by its blocks, and
      is the gradient of what they stand for.
    - `packed`: as `load` takes it. What stays packed has no gradient here, and none is compared.

    **Raises** `CheckpointError` as `load` does, and for expectations without `input_ids`.
    """
    if "input_ids" not in expected:
        raise CheckpointError("expectations need input_ids: the tokens that the rest was computed from")
    tokens = jnp.asarray(expected["input_ids"])
    read = partial(load, directory, family=family, packed=packed)
    model, narrow = read(dtype=jnp.float32), read(dtype=jnp.bfloat16) if "bfloat16.logits" in expected else None
    with jax.default_matmul_precision("highest"):
        lines = [*_compare_activations(model, narrow, tokens, expected, tolerance)]
        lines += _compare_routers(model, tokens, expected, tolerance)
        lines += _compare_gradients(model, tokens, expected, gradient_norms or {}, 2 * tolerance)
    return ParityReport(tuple(lines))


def _compare_activations(
    model: Decoder, bfloat16_model: Decoder | None, tokens: Any, expected: Mapping[str, np.ndarray], tolerance: float
) -> Iterator[Comparison]:
    ours = hidden_states(model, tokens)
    halves = None if bfloat16_model is None else hidden_states(bfloat16_model, tokens)
    blocks = unstack_blocks(model)
    alone = _run_layers_alone(model, blocks, expected)
    for number, state in enumerate(ours):
        name = f"hidden_states.{number}"
        if name in expected:
            wanted = expected[name]
            half, theirs = _compute_bfloat16_errors(name, None if halves is None else halves[number], expected)
            own = None if number not in alone else relative_error(alone[number], wanted)
            yield Comparison(
                _name_hidden_state(model, blocks, number), relative_error(state, wanted), tolerance, own, half, theirs
            )
    logits = eqx.filter_jit(Decoder.logits)
    if "logits" in expected:
        narrowed = None if bfloat16_model is None or halves is None else logits(bfloat16_model, halves[-1])
        half, theirs = _compute_bfloat16_errors("logits", narrowed, expected)
        yield Comparison(
            "logits", relative_error(logits(model, ours[-1]), expected["logits"]), tolerance, None, half, theirs
        )


def _name_hidden_state(model: Decoder, blocks: Sequence[Any], number: int) -> str:
    """What made one of the hidden states of the one before."""
    layer = number if model.hidden_states_skip_embedding else number - 1
    if layer == len(blocks):
        return "the final norm"
    if layer < 0:
        return "embedding"
    parts = [getattr(blocks[layer], part) for part in ("mixer", "ffn") if hasattr(blocks[layer], part)]
    words = ", ".join(to_snake_case(type(part).__name__) for part in parts)
    return f"layer {layer} ({words})" + (" and the final norm" if number == len(blocks) else "")


def _run_layers_alone(model: Decoder, blocks: Sequence[Any], expected: Mapping[str, np.ndarray]) -> dict[int, Any]:
    """What each layer makes of PyTorch's input to it, where that is known, by the number of the hidden state."""

    @eqx.filter_jit
    def run(block: Any, x: Any) -> Any:
        return block(Hidden(x), TokenInfo())[0].x

    norm = eqx.filter_jit(model.norm)
    found = {}
    for number in range(1, len(blocks) + 1):
        if f"hidden_states.{number - 1}" in expected:
            x = jnp.asarray(expected[f"hidden_states.{number - 1}"])
            if model.hidden_states_skip_embedding:
                found[number] = run(blocks[number], x) if number < len(blocks) else norm(x)
            else:
                out = run(blocks[number - 1], x)
                found[number] = out if number < len(blocks) else norm(out)
    return found


def _compare_routers(
    model: Decoder, tokens: Any, expected: Mapping[str, np.ndarray], tolerance: float
) -> Iterator[Comparison]:
    wanted = {name: x for name, x in expected.items() if name.startswith("router_logits.")}
    if not wanted:
        return
    found = eqx.filter_jit(lambda model, tokens: model.hidden(tokens, TokenInfo())[0].routing)(model, tokens)
    ours = {f"router_logits.{i}": one.logits.reshape(-1, one.logits.shape[-1]) for i, one in enumerate(found)}
    for name in sorted(wanted, key=lambda name: int(name.partition(".")[2])):
        yield Comparison(name, relative_error(ours[name], wanted[name]) if name in ours else float("inf"), tolerance)


def _compute_bfloat16_errors(
    name: str, ours: Any, expected: Mapping[str, np.ndarray]
) -> tuple[float | None, float | None]:
    """Our error in bfloat16, and PyTorch's."""
    narrow = expected.get(f"bfloat16.{name}")
    if ours is None or narrow is None:
        return None, None
    return relative_error(ours, expected[name]), relative_error(narrow, expected[name])


def relative_error(ours: Any, expected: np.ndarray) -> float:
    """max |ours - wanted| / max |wanted|; infinite where shapes differ or ours is not finite."""
    ours = np.asarray(ours, np.float32)
    if ours.shape != expected.shape or not np.isfinite(ours).all():
        return float("inf")
    return float(np.abs(ours - expected).max() / np.abs(expected).max())


def _compare_gradients(
    model: Decoder,
    tokens: Any,
    expected: Mapping[str, np.ndarray],
    gradient_norms: Mapping[str, float],
    tolerance: float,
) -> Iterator[Comparison]:
    """The loss is the mean over tokens of -log p(token), the first of each row left out."""
    stored = {name.removeprefix("grad."): wanted for name, wanted in expected.items() if name.startswith("grad.")}
    if not stored and not gradient_norms and "loss" not in expected:
        return
    loss, found, fixed = _compute_loss_and_gradients(model, tokens)
    gradient_norms = {name: norm for name, norm in gradient_norms.items() if name not in fixed}
    sizes = {name: float(np.linalg.norm(wanted)) for name, wanted in stored.items()}
    smallest = max({**gradient_norms, **sizes}.values(), default=0.0) * GRADIENT_FLOOR / tolerance
    if "loss" in expected:
        wanted = float(expected["loss"])
        yield Comparison("loss", abs(float(loss) - wanted) / abs(wanted), tolerance / 2)
    missing = float("inf")
    for name, wanted in stored.items():
        ours = found(name)
        far = missing if ours is None else float(np.linalg.norm(ours - wanted)) / max(sizes[name], smallest)
        yield Comparison(f"gradient of {name}", far, tolerance)
    for name in sorted(gradient_norms.keys() - stored.keys()):
        ours = found(name)
        far = (
            missing
            if ours is None
            else abs(float(np.linalg.norm(ours)) - gradient_norms[name]) / max(gradient_norms[name], smallest)
        )
        yield Comparison(f"norm of the gradient of {name}", far, tolerance)


def _compute_loss_and_gradients(
    model: Decoder, tokens: Any
) -> tuple[Any, Callable[[str], np.ndarray | None], Collection[str]]:
    """The loss; a function from the checkpoint's name of a parameter to its gradient; and the names of what has none,
    since it is not learnt."""

    @eqx.filter_jit
    def run(parameters: Any, rest: Any) -> Any:
        return jax.value_and_grad(lambda p: -score(eqx.combine(p, rest), tokens).mean())(parameters)

    parameters = trainable(model)
    rest = jax.tree.map(lambda x, p: None if p is not None else x, model, parameters, is_leaf=lambda x: x is None)
    loss, grads = run(parameters, rest)
    origin = model.origin
    assert origin is not None  # it was loaded
    table = read_name_map(origin.family, json.loads(origin.config), False)
    shapes, tensor = export_tensors(grads, table)

    def found(name: str) -> np.ndarray | None:
        name = name if name in shapes else name.removesuffix(BLOCKS_SUFFIX)
        return tensor(name) if name in shapes else None

    return loss, found, plan(model, table).keys() - shapes.keys()


def read_expectations(file: str | Path) -> dict[str, np.ndarray]:
    """What a safetensors file holds, by name."""
    return {name: tensor.read() for name, tensor in open_safetensors(Path(file)).items()}
