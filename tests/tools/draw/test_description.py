"""Descriptions of layouts: every parameter once, with the bytes of `zoo info`, and all moves along their axes."""

from pathlib import Path

import jax
import pytest

import zoo
from tests.tools.draw.conftest import make_shapes
from zoo.cli.parts import summarize
from zoo.parallel.devices import make_abstract_mesh
from zoo.tools.draw import describe_layout
from zoo.weights.shapes import read_shapes

FIXTURES = Path(__file__).parents[2] / "fixtures"
CHECKPOINTS = {path.parent.name: path.parent for path in sorted(FIXTURES.glob("*/*/config.json"))}
CHECKPOINTS |= {path.parent.name: path.parent for path in sorted(FIXTURES.glob("models/*/config.json"))}
"""Models win: a checkpoint in `scores` may have the same name, and has no loss that is known."""
MESHES = {
    "rwkv": {"fsdp": 2, "tensor": 2},
    "deepseek_v3": {"expert": 2, "fsdp": 2},
    "bert_masked": {"data": 2, "tensor": 2},
    "vit_classes": {"data": 2, "fsdp": 2},
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", [n if n in MESHES else pytest.param(n, marks=pytest.mark.slow) for n in CHECKPOINTS])
def test_describe_any_family(name):
    mesh = make_abstract_mesh(**MESHES.get(name, {"data": 2, "fsdp": 2}))
    directory = CHECKPOINTS[name]
    drawing = describe_layout(read_shapes(directory), mesh, seq_len=32)
    summary = summarize(directory, mesh).model
    drawn = {}
    for group in drawing.groups:
        for x in group.parameters:
            drawn[x.name] = drawn.get(x.name, 0) + x.bytes_per_device * max(len(group.layers), 1)
    rows = {}
    for row in summary.rows:
        rows[row.name] = rows.get(row.name, 0) + row.bytes_per_device
    assert drawn == rows and drawing.bytes_per_device == summary.bytes_per_device
    for axis in drawing.axes:
        along = [move for move in drawing.moves if axis.name in move.axes]
        assert axis.count == sum(x.count for x in along) > 0 and axis.bytes == sum(x.bytes for x in along)
    layers = sorted(layer for group in drawing.groups for layer in group.layers)
    assert layers == list(range(len(layers)))
    assert layers or any(x.startswith("shared.") for x in drawn), "ALBERT's layers have no parameters of their own"
    for group in drawing.groups:
        names = [x.name for x in group.parameters]
        assert len(set(names)) == len(names) or not group.layers, "Zamba2 updates its shared block in several layers"


def test_parameters_are_sharded_as_they_are_placed(describe):
    drawing = describe(data=2, fsdp=2, tensor=2)
    assert [group.name for group in drawing.groups] == ["before the layers", "4 layers: 0-3", "after the layers"]
    query = next(x for x in drawing.groups[1].parameters if x.name == "layers.*.attention.query.weight")
    assert (query.dims, query.shape) == (("heads", "embed"), (32, 32))
    assert query.sharded_axes == (("tensor",), ("fsdp",)) and query.gathered_axes == ((), ("fsdp",))
    assert (query.bytes, query.bytes_per_device) == (4 * 32 * 32, 32 * 32)
    experts = [x for x in describe(expert=2, context=2).groups[1].parameters if ".experts." in x.name]
    assert len(experts) == 3 and all(x.sharded_axes[0] == ("expert",) for x in experts)


def test_layers_are_shared_out_to_stages(describe):
    drawing = describe(pipe=2, data=2)
    block = drawing.groups[1]
    assert block.stages == 2 and "8 micro-batches" in drawing.batch
    assert block.bytes_per_device * 2 == block.bytes
    assert next(axis for axis in drawing.axes if axis.name == "pipe").shards == ("vocab", "layers")


def test_one_device_moves_nothing():
    drawing = describe_layout(make_shapes(), zoo.make_mesh(devices=jax.devices()[:1]))
    assert not drawing.axes and not drawing.moves and drawing.bytes == drawing.bytes_per_device
