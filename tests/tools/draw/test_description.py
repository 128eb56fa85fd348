"""Descriptions of layouts: every parameter once, bytes of `zoo info`, and moves that are those of the traced step."""

from pathlib import Path

import jax
import pytest

import zoo
from tests.tools.draw.conftest import make_shapes
from zoo.cli.parts import summarize
from zoo.parallel import SEQUENCE, ZERO2
from zoo.parallel.devices import make_abstract_mesh
from zoo.tools.draw import describe_layout
from zoo.weights.shapes import read_shapes

FIXTURES = Path(__file__).parents[2] / "fixtures"
CHECKPOINTS = {path.parent.name: path.parent for path in sorted(FIXTURES.glob("*/*/config.json"))}
MESHES = {
    "rwkv": {"fsdp": 2, "tensor": 2},
    "deepseek_v3": {"expert": 2, "fsdp": 2},
    "modernbert_masked": {"data": 2, "tensor": 2},
    "vit_classes": {"data": 2, "fsdp": 2},
}


def make(layout=None, **sizes):
    mesh = make_abstract_mesh(layout, **sizes)
    assert mesh is not None
    return mesh


def list_moves(drawing):
    """Return all moves: of the step, of groups, and of sections."""
    moves = [*drawing.moves]
    for group in drawing.groups:
        moves += [*group.moves, *(move for section in group.sections for move in section.moves)]
    return moves


def find_moves(drawing, **wanted):
    return [move for move in list_moves(drawing) if all(getattr(move, name) == x for name, x in wanted.items())]


def check_totals(drawing):
    """No collective of the trace is lost, and none counts twice."""
    for axis in drawing.axes:
        along = [move for move in list_moves(drawing) if axis.name in move.axes]
        assert (axis.count, axis.bytes) == (sum(x.count for x in along), sum(x.bytes for x in along))


QUICK = MESHES.keys() - {"modernbert_masked"}  # another encoder has its sections compared below


@pytest.mark.one_case
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CHECKPOINTS])
def test_describe_any_family(name):
    sizes = MESHES.get(name, {"data": 2, "fsdp": 2})
    mesh, directory = make(**sizes), CHECKPOINTS[name]
    drawing = describe_layout(read_shapes(directory), mesh, seq_len=32)
    summary = summarize(directory, mesh).model
    drawn = {}
    for x in drawing.parameters:
        drawn[x.name] = drawn.get(x.name, 0) + x.bytes_per_device
    rows = {}
    for row in summary.rows:
        rows[row.name] = rows.get(row.name, 0) + row.bytes_per_device
    assert drawn == rows and drawing.bytes_per_device == summary.bytes_per_device
    check_totals(drawing)
    assert all(axis.count for axis in drawing.axes)
    layers = sorted(layer for group in drawing.groups for layer in group.layers)
    assert layers == list(range(len(layers))) and layers
    for group in drawing.groups:
        names = [x.name for x in group.parameters]
        assert len(set(names)) == len(names)


def test_moves_of_zero3_and_tensor_parallelism(describe):
    drawing = describe(data=2, fsdp=2, tensor=2)
    assert [x.name for x in drawing.groups[-1].sections] == ["norm", "head", "loss"]
    block = next(group for group in drawing.groups if group.layers)
    sections = {section.name: section for section in block.sections}
    (forward, backward) = sections["attention"].moves
    assert (forward.collective, forward.axes, forward.subject, forward.count) == ("all-reduce", ("tensor",), "out", 4)
    assert (backward.subject, backward.count) == ("query, key, value", 3 * 4)
    gathered, _, scattered = block.moves
    assert (gathered.collective, gathered.axes, gathered.subject) == ("all-gather", ("fsdp",), "9 parameters")
    assert scattered.collective == "reduce-scatter" and scattered.count == gathered.count == 9 * 4
    assert gathered.bytes == sum(2 * x.bytes_per_device for x in block.parameters), "fsdp 2: twice the shards"
    (gradients,) = find_moves(drawing, phase="update", subject="gradients")
    assert gradients.axes == ("data",) and gradients.bytes == drawing.bytes_per_device
    query = next(x for x in block.parameters if x.name == "layers.*.attention.query.weight")
    assert (query.dims, query.shape) == (("heads", "embed"), (32, 32))
    assert query.sharded_axes == (("tensor",), ("fsdp",)) and query.gathered_axes == ((), ("fsdp",))


def test_moves_of_zero2_and_sequence_parallelism():
    layout = ZERO2.with_dims(tokens=SEQUENCE.axes("tokens"))
    drawing = describe_layout(make_shapes(), make(layout, tensor=2, fsdp=2), seq_len=32)
    assert not find_moves(drawing, collective="all-gather", axes=("fsdp",))
    assert find_moves(drawing, collective="reduce-scatter", axes=("fsdp",), subject="9 parameters")
    subjects = {move.subject for move in find_moves(drawing, collective="reduce-scatter", phase="forward")}
    assert {"out", "down"} <= subjects
    check_totals(drawing)


def test_moves_of_a_pipeline(describe):
    drawing = describe(pipe=2, data=2)
    block = next(group for group in drawing.groups if group.layers)
    assert block.layer_axes == ("pipe",) and "8 micro-batches" in drawing.batch
    (hop,) = find_moves(drawing, collective="permute", phase="forward")
    assert hop.axes == ("pipe",) and hop.count == 8 + 2 - 1, "micro-batches + stages - 1"
    check_totals(drawing)


def test_moves_of_a_ring_and_of_experts(describe):
    drawing = describe(expert=2, context=2)
    assert find_moves(drawing, collective="permute", axes=("context",), phase="forward")
    to_experts = find_moves(drawing, axes=("expert",), phase="forward")
    assert {"all-to-all", "all-gather", "reduce-scatter"} & {move.collective for move in to_experts}
    experts = [x for x in drawing.parameters if ".experts." in x.name]
    assert len(experts) == 3 and all(x.sharded_axes[0] == ("expert",) for x in experts)
    (block,) = [group for group in drawing.groups if group.layers]
    assert [x.name for x in block.sections] == ["mixer_norm", "attention", "ffn_norm", "mixture_of_experts"]
    check_totals(drawing)


def test_sections_are_in_the_order_of_their_calls():
    drawing = describe_layout(read_shapes(CHECKPOINTS["bert_masked"]), make(tensor=2))
    (block,) = [group for group in drawing.groups if group.layers]
    assert [section.name for section in block.sections] == ["bidirectional_attention", "mixer_norm", "mlp", "ffn_norm"]
    head = next(section for section in drawing.groups[-1].sections if section.name == "head")
    assert [(move.collective, move.subject, move.phase) for move in head.moves] == [("all-reduce", "table", "backward")]
    check_totals(drawing)


def test_one_device_moves_nothing():
    drawing = describe_layout(make_shapes(), zoo.make_mesh(devices=jax.devices()[:1]))
    assert not drawing.axes and not list_moves(drawing) and drawing.bytes == drawing.bytes_per_device


def test_describe_takes_a_loss_of_your_own():
    def loss_fn(model, batch):
        return zoo.cross_entropy(zoo.cast(model, "bfloat16"), batch)

    tokens = jax.ShapeDtypeStruct((2, 16), "int32")
    batch = {"tokens": tokens, "targets": tokens}
    mesh, model = make(fsdp=2), make_shapes()
    drawing = describe_layout(model, mesh, loss_fn=loss_fn, batch=batch)
    (gathered,) = find_moves(drawing, collective="all-gather", subject="9 parameters", phase="forward")
    (block,) = [group for group in drawing.groups if group.layers]
    in_float32 = sum(2 * x.bytes_per_device for x in block.parameters)
    assert in_float32 / 2 <= gathered.bytes < 0.55 * in_float32, "norms stay in float32"
    with pytest.raises(ValueError, match="belong together"):
        describe_layout(model, mesh, loss_fn=loss_fn)
    with pytest.raises(TypeError, match="Linear is not a Decoder, Encoder or ImageEncoder"):
        describe_layout(zoo.layers.Linear(4, 4, key=jax.random.key(0)), mesh)
