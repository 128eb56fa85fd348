"""Compare a checkpoint with PyTorch, layer by layer, to find the layer that a port got wrong.

Each layer is compared twice: in the forward pass from the tokens, where errors accumulate, and by itself, on PyTorch's
own input to it. The second comparison tells the wrong layer from the layers after it.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo.layers.encoders.patches import PatchedImages
from zoo.models import Decoder, ImageText, TwoTowers
from zoo.models.hf.spec import Family, replace_ending
from zoo.models.hf.values import NON_NEGATIVE_NUMBER, optional, table_of
from zoo.models.parameter_paths import to_snake_case
from zoo.models.scoring import unstack_blocks
from zoo.parallel.fields import NAMED_BY_CLASS
from zoo.parallel.gradient import value_and_grad
from zoo.parallel.mesh import make_mesh
from zoo.parallel.module import array_fields
from zoo.parallel.place import place
from zoo.weights.load import load
from zoo.weights.packed import BLOCKS_SUFFIX
from zoo.weights.plan import plan_tensors
from zoo.weights.resolve import LoadedModel
from zoo.weights.safetensors import CheckpointError, open_safetensors, read_json
from zoo.weights.save import export_tensors
from zoo.weights.stages import read_name_map

from .activations import TextInputs, join_streams, zero_padding
from .comparison import GRADIENT_FLOOR, TOLERANCE, Comparison, ParityReport, norm_error, relative_error
from .model_kinds import LossAndBatch, ModelKind, find_model_kind, iterate_parts

OUTPUTS = (
    *("logits", "last_hidden_state", "pooler_output"),
    *("text_embeds", "image_embeds", "logits_per_image", "logits_per_text", "image_features"),
)
"""Results of models, by their names in transformers."""
EXPECTED_FILE = "expected.safetensors"
"""Results of PyTorch in a checkpoint directory."""


def compare_checkpoint(
    directory: str | Path,
    expected: Mapping[str, np.ndarray],
    *,
    gradient_norms: Mapping[str, float] | None = None,
    tolerance: float = TOLERANCE,
    family: Family | None = None,
    packed: bool = False,
) -> ParityReport:
    """Compare the model in a directory with results of PyTorch.

    - `expected`: `input_ids`, of an encoder also `attention_mask`, `token_type_ids` and `labels`; or, for images,
      `pixel_values` and `labels`; with a decoder also `decoder_input_ids` and `labels`, and `encoder_hidden_states.N`
      and `decoder_hidden_states.N` in place of `hidden_states.N`; and any of `logits`, `last_hidden_state`,
      `pooler_output`, `loss`, `hidden_states.N`, `router_logits.N` (of the N-th layer that has a router, "tokens
      experts") and `grad.NAME`; of PyTorch in bfloat16, `bfloat16.logits` and `bfloat16.hidden_states.N`. Of two
      towers, `input_ids`, `pixel_values` and what belongs to them, and any of `text_embeds`, `image_embeds`,
      `logits_per_image`, `logits_per_text`, `loss`, `grad.NAME`, and each tower's hidden states with `text_` and
      `vision_` before the name. Of texts with images, `input_ids`, `labels`, `pixel_values` rows first (and
      `image_grid_thw`, "batch images 3"), `image_features`, and optionally `spans`.
    - `gradient_norms`: norms of the loss's gradient, by the checkpoint's names. An MXFP4 matrix is named by its blocks,
      and the gradient of any quantized matrix is taken with respect to the dequantized one.
    - `packed`: as for `load`. Matrices that stay packed have no gradient, and none is compared.

    The loss is the mean next-token cross-entropy; for an encoder of texts, the cross-entropy of every token itself; for
    images, the cross-entropy over `labels`, or `feature_loss` without labels; for two towers, `contrastive_loss`.

    **Raises** `CheckpointError` as `load` does, and for expectations without the inputs of the model.
    """
    load_as = partial(load, directory, family=family, packed=packed)
    model = load_as(dtype=jnp.float32)
    kind = find_model_kind(model)
    if kind.inputs not in expected:
        raise CheckpointError(f"expectations need {kind.inputs}, which the other results were computed from")
    if "bfloat16.logits" in expected:
        bfloat16_model = load_as(dtype=jnp.bfloat16)
    else:
        bfloat16_model = None
    with jax.default_matmul_precision("highest"):
        expected = join_streams(model, expected)
        comparisons = []
        for word, part, own in iterate_parts(model, expected):
            lines = _compare_activations(find_model_kind(part), part, bfloat16_model, own, tolerance)
            comparisons += [dataclasses.replace(line, name=word + line.name) for line in lines]
        comparisons += _compare_gradients(kind, model, expected, gradient_norms or {}, 2 * tolerance)
    return ParityReport(tuple(comparisons))


def make_loss(model: LoadedModel, expected: Mapping[str, np.ndarray]) -> LossAndBatch:
    """Return the loss whose gradients `compare_checkpoint` compares, and its batch."""
    return find_model_kind(model).make_loss(expected)


_unstack_blocks = eqx.filter_jit(unstack_blocks)


def _compare_activations(
    kind: ModelKind,
    model: LoadedModel,
    bfloat16_model: LoadedModel | None,
    expected: Mapping[str, np.ndarray],
    tolerance: float,
) -> Iterator[Comparison]:
    """Compare hidden states, outputs and router logits, and each layer by itself on PyTorch's input to it."""
    blocks = () if isinstance(model, TwoTowers | ImageText) else _unstack_blocks(model)
    model_inputs = kind.read(expected)
    if isinstance(model_inputs, TextInputs | PatchedImages):  # transformers' features of padding are not a result
        of_tokens = {name: x for name, x in expected.items() if _has_tokens(name)}
        padded = {name: np.asarray(zero_padding(x, model_inputs.mask)) for name, x in of_tokens.items()}
        expected = {**expected, **padded}
    states = {number: f"hidden_states.{number}" for number in range(len(blocks) + 1)}
    stored = {number: name for number, name in states.items() if name in expected}
    ours = kind.run(model, blocks, model_inputs, {number: expected[name] for number, name in stored.items()})
    in_bfloat16 = None
    if bfloat16_model is not None:
        in_bfloat16 = kind.run(bfloat16_model, _unstack_blocks(bfloat16_model), model_inputs, {})
    for number, name in stored.items():
        own = None
        if number in ours.layers_alone:
            own = relative_error(ours.layers_alone[number], expected[name])
        in_half = None if in_bfloat16 is None else in_bfloat16.hidden_states[number]
        yield Comparison(
            _name_hidden_state(model, blocks, number),
            relative_error(ours.hidden_states[number], expected[name]),
            tolerance,
            own,
            *_compute_bfloat16_errors(name, in_half, expected),
        )
    for name in OUTPUTS:
        if name in expected:
            in_half = None if in_bfloat16 is None else in_bfloat16.outputs.get(name)
            error = relative_error(ours.outputs.get(name), expected[name])
            yield Comparison(name, error, tolerance, None, *_compute_bfloat16_errors(name, in_half, expected))
    routers = dict(enumerate(ours.router_logits))
    numbers = [int(name.partition(".")[2]) for name in expected if name.startswith("router_logits.")]
    for number in sorted(numbers):
        name = f"router_logits.{number}"
        yield Comparison(name, relative_error(routers.get(number), expected[name]), tolerance)


def _has_tokens(name: str) -> bool:
    return name in ("logits", "last_hidden_state") or name.startswith("hidden_states.")


def _name_hidden_state(model: LoadedModel, blocks: Sequence[Any], number: int) -> str:
    """Name the layer that computes a hidden state: `layer 1 (attention, gated_mlp)`."""
    skips_embedding = isinstance(model, Decoder) and model.hidden_states_skip_embedding
    layer = number if skips_embedding else number - 1
    if layer == len(blocks):
        return "the final norm"
    if layer < 0:
        return "embedding"
    block = blocks[layer]
    parts = [getattr(block, field.name) for field in array_fields(block) if NAMED_BY_CLASS in field.metadata]
    words = ", ".join(to_snake_case(type(part).__name__) for part in parts)
    if number == len(blocks) and isinstance(model, Decoder):
        return f"layer {layer} ({words}) and the final norm"
    return f"layer {layer} ({words})"


def _compute_bfloat16_errors(
    name: str, ours: Any, expected: Mapping[str, np.ndarray]
) -> tuple[float | None, float | None]:
    """Return our error in bfloat16, and PyTorch's."""
    theirs = expected.get(f"bfloat16.{name}")
    if ours is None or theirs is None:
        return None, None
    return relative_error(ours, expected[name]), relative_error(theirs, expected[name])


def _compare_gradients(
    kind: ModelKind,
    model: LoadedModel,
    expected: Mapping[str, np.ndarray],
    gradient_norms: Mapping[str, float],
    tolerance: float,
) -> Iterator[Comparison]:
    """Compare the loss, and its gradients or their norms."""
    stored = {name.removeprefix("grad."): x for name, x in expected.items() if name.startswith("grad.")}
    if not stored and not gradient_norms and "loss" not in expected:
        return
    loss, find_gradient, frozen = _compute_loss_and_gradients(model, *kind.make_loss(expected))
    stored = {name: x for name, x in stored.items() if name not in frozen}
    gradient_norms = {name: norm for name, norm in gradient_norms.items() if name not in frozen}
    stored_norms = {name: float(np.linalg.norm(x)) for name, x in stored.items()}
    smallest = max({**gradient_norms, **stored_norms}.values(), default=0.0) * GRADIENT_FLOOR / tolerance
    if "loss" in expected:
        yield Comparison("loss", norm_error(float(loss), float(expected["loss"])), tolerance / 2)
    for name, gradient in stored.items():
        error = norm_error(find_gradient(name), gradient, smallest)
        yield Comparison(f"gradient of {name}", error, tolerance)
    for name in sorted(gradient_norms.keys() - stored.keys()):
        ours = find_gradient(name)
        norm = None if ours is None else np.linalg.norm(ours)
        error = norm_error(norm, gradient_norms[name], smallest)
        yield Comparison(f"norm of the gradient of {name}", error, tolerance)


def _compute_loss_and_gradients(
    model: LoadedModel, loss_fn: Callable, batch: dict[str, np.ndarray]
) -> tuple[Any, Callable[[str], np.ndarray | None], Collection[str]]:
    """Return the loss; a function from a parameter's checkpoint name to its gradient; and the names of the tensors that
    have none because they are not trainable."""
    mesh = make_mesh(devices=jax.devices()[:1])
    loss, grads = value_and_grad(loss_fn, mesh)(place(model, mesh), batch)
    origin = model.origin
    assert origin is not None  # it was loaded
    name_map = read_name_map(dataclasses.replace(origin, lacks_base_prefix=False))
    tensors = export_tensors(jax.tree.map(np.asarray, grads), name_map)

    def find_gradient(name: str) -> np.ndarray | None:
        base = next(iter(name_map)).partition(".")[0]  # absent from names of a model without its head
        plain = replace_ending(name.removesuffix(BLOCKS_SUFFIX), origin.family.older_endings)
        names = (name, plain, f"{base}.{name}")
        return next((tensors[name].read() for name in names if name in tensors), None)

    frozen = plan_tensors(model, name_map).keys() - tensors.keys()
    return loss, find_gradient, frozen | {f"{name.removesuffix('.codes')}.weight" for name in frozen}


def read_expectations(file: str | Path) -> dict[str, np.ndarray]:
    """Read the arrays of a safetensors file, by name."""
    return {name: tensor.read() for name, tensor in open_safetensors(Path(file)).items()}


def read_gradient_norms(directory: Path) -> dict[str, float] | None:
    """Return the norms of PyTorch's gradients by tensor name, if `meta.json` of a directory has them.

    **Raises** `CheckpointError` for a file of another form.
    """
    file = directory / "meta.json"
    if not file.is_file():
        return None
    norms = read_json(file).get("grad_norm")
    if error := optional(table_of(NON_NEGATIVE_NUMBER)).find_error(norms):
        raise CheckpointError(f"{file}: grad_norm {error}")
    return norms
