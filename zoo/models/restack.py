"""Split the layers of a model anew into segments: for the stages of a pipeline, for kinds of layers, of fewer layers,
and with other mixers."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import equinox as eqx
import jax

from zoo.layers import AbstractMixer
from zoo.parallel.module import replace_option

from .capture import refuse_edits
from .decoder import AbstractBlock, Decoder
from .segment import Segment, make_segments, number_structures, stack_trees
from .stack import Stack, is_stack

_Model = TypeVar("_Model")


def split_ends(model: _Model, stages: int) -> _Model:
    """Move as few layers as possible out of the stages of a pipeline, so that the others divide evenly over them.

        model = zoo.models.split_ends(model, stages=pipe * rounds)

    The layers of the longest repeating pattern are dealt out to `stages`: the size of the mesh axis `pipe`, times the
    `rounds` of the layout. If that does not divide its repeats, the last of them become ends: every device has them, as
    it has the embedding, and runs them after the stages. Layers keep their numbers and parameters, and results stay the
    same. Returns a model that divides as it is.

    `model` may be any tree with stacks in it: gradients, optimizer state, `jax.ShapeDtypeStruct`s, whose shardings are
    dropped. **Raises** `ValueError` for fewer repeats than stages.
    """
    if stages < 1:
        raise ValueError(f"layers are dealt out to one stage or more, not stages={stages}")
    split = lambda segment: segment.split_ends(stages) if segment.layers[-1].name == "layers" else (segment,)

    def split_stack(stack: Stack) -> Stack:
        return replace_option(stack, "segments", tuple(part for segment in stack.segments for part in split(segment)))

    return _map_stacks(split_stack, model)


def keep_layers(model: Decoder, layers: Sequence[int]) -> Decoder:
    """Return a model with only these layers, in this order: a student that begins as a part of its teacher (DistilBERT,
    Sanh et al., arXiv:1910.01108, section 3).

        student = zoo.models.keep_layers(teacher, range(0, 28, 2))     # every second layer

    All other parameters are the model's own. The result has no `origin`: it is saved as a model from scratch is.

    **Raises** `ValueError` for no layers, for a layer that the model does not have, and for edits (`zoo.patch`);
    `NotImplementedError` for a model with layers that read what other layers computed or share parameters.
    """
    blocks = _take_blocks(model, "keep_layers")
    layers = list(layers)
    if not layers:
        raise ValueError("layers is empty: expected at least one layer")
    _check_layers(layers, len(blocks))
    return _restack(model, [blocks[layer] for layer in layers])


def replace_mixers(
    model: Decoder, mixers: Mapping[int, AbstractMixer | Callable[[AbstractMixer], AbstractMixer]]
) -> Decoder:
    """Return a model with other mixers in these layers: a Transformer becomes a hybrid.

        copy = partial(copy_to_gated_delta_net, key=key)
        hybrid = zoo.models.replace_mixers(model, {1: copy, 2: copy})

    - `mixers`: by layer, the mixer, or a function of the present mixer that returns it.

    All other parameters are the model's own, under their names; those of a mixer are named by its class. Layers are
    stacked anew: a pattern of equal layers is compiled once. The result has no `origin`, as a model from scratch.

    **Raises** `ValueError` for a layer that the model does not have and for edits (`zoo.patch`), `TypeError` for a
    layer without a mixer and for anything but a mixer to replace one; `NotImplementedError` for a model with layers
    that read what other layers computed or share parameters.
    """
    blocks = _take_blocks(model, "replace_mixers")
    _check_layers(mixers, len(blocks))
    for layer, given in mixers.items():
        present = getattr(blocks[layer], "mixer", None)
        if not isinstance(present, AbstractMixer):
            raise TypeError(f"layer {layer} is a {type(blocks[layer]).__name__}, which has no mixer to replace")
        mixer = given if isinstance(given, AbstractMixer) else given(present)
        if not isinstance(mixer, AbstractMixer):
            raise TypeError(f"expected a mixer for layer {layer}, got {type(mixer).__name__}")
        blocks[layer] = eqx.tree_at(lambda block: block.mixer, blocks[layer], mixer)
    return _restack(model, blocks)


def _take_blocks(model: Decoder, caller: str) -> list[AbstractBlock]:
    """Return the block of each layer, of a model without edits whose layers do not depend on one another."""
    refuse_edits(model, caller)
    stack = model.stack
    if not isinstance(stack, Stack):
        raise TypeError(f"expected a model with a Stack, got one with {type(stack).__name__}")
    blocks = list(stack.iter_blocks())
    if stack.shared or model.layer_inputs is not None or any(block.extends_hidden for block in blocks):
        raise NotImplementedError("layers of this model depend on one another: none can be taken out or changed")
    return blocks


def _check_layers(layers: Iterable[int], count: int) -> None:
    for layer in layers:
        if not 0 <= layer < count:
            raise ValueError(f"there is no layer {layer}: the model has layers 0 to {count - 1}")


def _restack(model: Decoder, blocks: Sequence[AbstractBlock]) -> Decoder:
    """Return the model with these layers, in as few patterns as possible."""

    def stack_blocks(layers: range) -> AbstractBlock:
        return stack_trees([blocks[layer] for layer in layers])

    stack = replace_option(model.stack, "segments", make_segments(number_structures(blocks), stack_blocks))
    return dataclasses.replace(model, stack=stack, origin=None)


def join_end_shapes(model: _Model) -> _Model:
    """Undo `split_ends` in a tree of `jax.ShapeDtypeStruct`s."""

    def can_join(segment: Segment, end: Segment) -> bool:
        is_end = (segment.layers[-1].name, end.layers[-1].name) == ("layers", "ends")
        one_repeat = [jax.tree.map(lambda x: (x.shape[1:], x.dtype), s.blocks) for s in (segment, end)]
        return is_end and bool(eqx.tree_equal(*one_repeat))

    def join(segment: Segment, end: Segment) -> Segment:
        repeats = segment.num_repeats + end.num_repeats
        lengthen = lambda x: jax.ShapeDtypeStruct((repeats, *x.shape[1:]), x.dtype)
        return Segment(jax.tree.map(lengthen, segment.blocks), repeats, segment.layers)

    def join_stack(stack: Stack) -> Stack:
        segments: list[Segment] = []
        for segment in stack.segments:
            if segments and can_join(segments[-1], segment):
                segment = join(segments.pop(), segment)
            segments.append(segment)
        return replace_option(stack, "segments", tuple(segments))

    return _map_stacks(join_stack, model)


def stack_apart(model: _Model, keys: Sequence[Hashable]) -> _Model:
    """Split the layers of a model of `jax.ShapeDtypeStruct`s anew into segments, where some of its arrays stack layers
    with different keys. `keys` has one for each layer."""

    def split(stack: Stack) -> Stack:
        if all(len({keys[number] for number in layers}) == 1 for _, layers in stack.iter_stacked()):
            return stack
        blocks: dict[int, AbstractBlock] = {}
        for block, layers in stack.iter_stacked():
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), block)
            for number in layers:
                blocks[number] = one
        kinds = [(jax.tree.structure(blocks[i]), *jax.tree.leaves(blocks[i]), keys[i]) for i in range(len(blocks))]

        def lengthen(layers: range) -> AbstractBlock:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(layers), *x.shape), x.dtype), blocks[layers[0]])

        segments = make_segments([kinds.index(kind) for kind in kinds], lengthen)
        return replace_option(stack, "segments", segments)

    return _map_stacks(split, model)


def _map_stacks(function: Callable[[Stack], Stack], tree: _Model) -> _Model:
    return jax.tree.map(lambda x: function(x) if isinstance(x, Stack) else x, tree, is_leaf=is_stack)
