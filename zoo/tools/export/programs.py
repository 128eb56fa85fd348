"""The programs of a model, as functions of weights, arrays and states that are lists and dicts of arrays only."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.layers import TokenInfo
from zoo.models import Decoder
from zoo.models.decoder import LayerStates
from zoo.models.encoders.heads import EncoderFeatures, MaskedLMHead, ReplacedTokenHead, TokenClassificationHead
from zoo.parallel import Mesh, leaves
from zoo.parallel.batch import find_batch_axis, place_batch
from zoo.parallel.place import place
from zoo.parallel.spmd import spmd

Size = Any
"""A number, or a dim of `jax.export.symbolic_shape`."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function `run(weights, *inputs)`, with the shapes of its inputs and the names of its results."""

    run: Callable
    inputs: Mapping[str, Any]
    """Shape of each input; of the input `states` a list of them."""
    outputs: tuple[str, ...]
    """Names of the results; () for a dict that has them."""
    states: tuple[str, ...] = ()
    """Names of the states."""


@dataclasses.dataclass(frozen=True)
class ProgramBuilder:
    """Builds the programs of a model for sizes and a mesh."""

    model: Any
    """A model of `jax.ShapeDtypeStruct`s."""
    rebuild: Callable[[dict[str, Any]], Any]
    """From weights by name to the model."""
    batch: Size
    seq_len: Size
    mesh: Mesh | None

    def build_decoder(self, length: int | None) -> dict[str, Program]:
        """Build `forward`, and unless `length` is None `init`, `prefill` and `decode` for caches of that capacity."""
        tokens = self._describe("tokens", (self.batch, self.seq_len), jnp.int32)
        forward = self._run(lambda model, tokens: model(tokens), "batch seq vocab")
        run_forward = lambda weights, tokens: forward(self.rebuild(weights), tokens)
        programs = {"forward": Program(run_forward, {"tokens": tokens}, ("logits",))}
        if length is None:
            return programs
        rows = self._describe("rows", (self.batch,), jnp.int32)
        shapes = eqx.filter_eval_shape(self._init_states, self.model, rows, length)
        if self.mesh is not None:
            shapes = place(shapes, self.mesh)
        names = tuple(f"states.{leaf.name}" for leaf in leaves(shapes))
        states, treedef = jax.tree.flatten(shapes)
        step = self._run(_read_tokens, ("batch vocab", ""))

        def run_init(weights: dict[str, Array], rows: Int[Array, "batch"]) -> list[Array]:
            return jax.tree.leaves(self._init_states(self.rebuild(weights), rows, length))

        def run_step(weights: dict[str, Array], tokens: Array, positions: Array, states: list[Array]) -> Any:
            before = jax.tree.unflatten(treedef, states)
            logits, after = step(self.rebuild(weights), tokens, positions, before)
            return logits, jax.tree.leaves(after)

        programs["init"] = Program(run_init, {"rows": rows}, ("states",), names)
        for name, width in (("prefill", self.seq_len), ("decode", 1)):
            column = self._describe("tokens", (self.batch, width), jnp.int32)
            inputs = {"tokens": column, "positions": column, "states": states}
            programs[name] = Program(run_step, inputs, ("logits", "states"), names)
        return programs

    def build_encoder(self) -> dict[str, Program]:
        """Build `forward` of an encoder of texts, with a padding mask."""
        tokens = self._describe("tokens", (self.batch, self.seq_len), jnp.int32)
        inputs = {"tokens": tokens, "mask": self._describe("tokens", (self.batch, self.seq_len), jnp.bool_)}
        if self.model.type_embedding is not None:
            inputs["token_types"] = tokens
        names = tuple(inputs)[1:]
        call = lambda model, tokens, *rest: model(tokens, **dict(zip(names, rest, strict=True)))
        return {"forward": self._build_head(call, inputs)}

    def build_image_encoder(self, size: tuple[int, int]) -> dict[str, Program]:
        """Build `forward` of an encoder of images of this height and width."""
        channels = self.model.embedding.patches.weight.shape[1]
        images = self._describe("images", (self.batch, channels, *size), jnp.float32)
        return {"forward": self._build_head(lambda model, images: model(images), {"images": images})}

    def _build_head(self, call: Callable, inputs: Mapping[str, Any]) -> Program:
        call = self._run(call, _name_result_dims(self.model.head))
        has_features = isinstance(
            eqx.filter_eval_shape(lambda model, *x: call(model, *x), self.model, *inputs.values()), EncoderFeatures
        )

        def run(weights: dict[str, Array], *inputs: Array) -> Any:
            result = call(self.rebuild(weights), *inputs)
            if not has_features:
                return result
            features = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
            return {name: x for name, x in features.items() if x is not None}

        return Program(run, inputs, () if has_features else ("logits",))

    def _run(self, function: Callable, out: Any) -> Callable:
        """Return a function of a model and arrays, on the mesh if there is one."""
        if self.mesh is None:
            return function
        return spmd(function, self.mesh, out=out)

    def _init_states(self, model: Decoder, rows: Int[Array, "batch"], length: int) -> LayerStates:
        """Return empty states for as many rows as `rows` has. They are made as global arrays on a mesh, too."""
        batch = rows.shape[0]
        if self.mesh is not None:
            return place(model.init_state(batch, length), self.mesh)
        one = model.init_state(1, length)
        arrays, treedef = jax.tree.flatten(one)
        repeated = []  # all rows of empty states are alike, and a symbolic number is not an int
        for leaf, x in zip(leaves(one), arrays, strict=True):
            axis = find_batch_axis(leaf, x)
            if axis is not None:
                x = jnp.broadcast_to(x, (*x.shape[:axis], batch, *x.shape[axis + 1 :]))
            repeated.append(x)
        return jax.tree.unflatten(treedef, repeated)

    def _describe(self, name: str, shape: tuple[Size, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Describe an array of a batch, with its sharding on the mesh. `name` is one of a batch's."""
        described = jax.ShapeDtypeStruct(shape, dtype)
        if self.mesh is None:
            return described
        return place_batch({name: described}, self.mesh)[name]


def _read_tokens(
    model: Decoder, tokens: Int[Array, "batch seq"], positions: Int[Array, "batch seq"], states: LayerStates
) -> tuple[Float[Array, "batch vocab"], LayerStates | None]:
    """Read tokens behind those in `states`; return the logits after the last, and the states. Padding is on the left,
    at position -1."""
    hidden, states_after = model.hidden(tokens, TokenInfo(positions), states)
    return model.logits(hidden.x[:, -1]), states_after


def _name_result_dims(head: Any) -> str:
    if isinstance(head, MaskedLMHead):
        return "batch seq vocab"
    if isinstance(head, TokenClassificationHead):
        return "batch seq classes"
    if isinstance(head, ReplacedTokenHead):
        return "batch seq"
    return "batch classes"
