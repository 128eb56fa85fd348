"""Moves of a training step: which collectives, along which axes, of what, how often and how many bytes."""

import jax
import pytest

import zoo
from tests.tools.draw.conftest import make_shapes
from zoo.parallel import SEQUENCE, ZERO2
from zoo.parallel.devices import make_abstract_mesh
from zoo.tools.draw import describe_layout


def find_moves(drawing, **wanted):
    return [move for move in drawing.moves if all(getattr(move, name) == x for name, x in wanted.items())]


def test_moves_of_zero3_and_tensor_parallelism(describe):
    drawing = describe(data=2, fsdp=2, tensor=2)
    forward, _ = find_moves(drawing, in_layers=True, axes=("tensor",), phase="forward")
    assert (forward.collective, forward.subject, forward.count) == ("all-reduce", "attention: out", 4)
    _, backward = find_moves(drawing, in_layers=True, axes=("tensor",), phase="backward")
    assert (backward.subject, backward.count) == ("attention: value, key, query", 3 * 4)
    gathered, _, scattered = find_moves(drawing, in_layers=True, axes=("fsdp",))
    assert (gathered.collective, gathered.subject) == ("all-gather", "parameters")
    assert scattered.collective == "reduce-scatter" and scattered.count == gathered.count == 9 * 4
    assert gathered.bytes == 2 * drawing.groups[1].bytes_per_device, "fsdp 2: twice the shards"
    (gradients,) = find_moves(drawing, phase="update", axes=("data",))
    assert gradients.subject == "gradients" and gradients.bytes == drawing.bytes_per_device


def test_moves_of_zero2_and_sequence_parallelism():
    layout = ZERO2.with_dims(tokens=SEQUENCE.axes("tokens"))
    mesh = make_abstract_mesh(layout, tensor=2, fsdp=2)
    drawing = describe_layout(make_shapes(), mesh, seq_len=32)
    assert not find_moves(drawing, collective="all-gather", axes=("fsdp",))
    assert find_moves(drawing, collective="reduce-scatter", axes=("fsdp",), subject="parameters")
    subjects = {move.subject for move in find_moves(drawing, collective="reduce-scatter", phase="forward")}
    assert {"attention: out", "gated_mlp: down"} <= subjects


def test_moves_of_a_pipeline(describe):
    (hop,) = find_moves(describe(pipe=2, data=2), collective="permute", phase="forward")
    assert hop.axes == ("pipe",) and hop.subject == "hidden states"
    assert hop.in_layers and hop.count == 8 + 2 - 1, "micro-batches + stages - 1"


def test_moves_of_a_ring_and_of_experts(describe):
    drawing = describe(expert=2, context=2)
    assert find_moves(drawing, collective="permute", axes=("context",), phase="forward", subject="attention")
    to_experts = find_moves(drawing, axes=("expert",), phase="forward", subject="mixture_of_experts")
    assert {"all-to-all", "all-gather", "reduce-scatter"} & {move.collective for move in to_experts}


def test_moves_of_a_loss_of_your_own():
    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, "bfloat16"), batch)

    tokens = jax.ShapeDtypeStruct((2, 16), "int32")
    batch = {"tokens": tokens, "targets": tokens}
    mesh = make_abstract_mesh(fsdp=2)
    drawing = describe_layout(make_shapes(), mesh, loss_fn=loss_fn, batch=batch)
    (gathered,) = find_moves(drawing, in_layers=True, collective="all-gather", phase="forward")
    in_float32 = 2 * drawing.groups[1].bytes_per_device
    assert in_float32 / 2 <= gathered.bytes < 0.55 * in_float32, "norms stay in float32"
    assert drawing.batch == "a batch of 2 x 16"
    with pytest.raises(ValueError, match="belong together"):
        describe_layout(make_shapes(), mesh, loss_fn=loss_fn)
    with pytest.raises(TypeError, match="Linear is not a Decoder, Encoder or ImageEncoder"):
        describe_layout(zoo.layers.Linear(4, 4, key=jax.random.key(0)), mesh)
