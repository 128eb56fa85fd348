"""Pictures of layouts: every parameter with its shards and its axes, every move, and all of it inside the frame."""

import collections
import dataclasses
import re
import xml.etree.ElementTree as ElementTree

import equinox as eqx
import jax
import pytest

import zoo
from tests.tools.draw.conftest import SIZES, make_shapes
from zoo.tools.draw import draw_layout
from zoo.tools.draw.layout import _list_kinds, render_drawing

SVG = "{http://www.w3.org/2000/svg}"
MESHES = {
    "data x fsdp x tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "expert x context": {"expert": 2, "context": 2},
    "pipe": {"pipe": 2, "data": 2},
    "many": {"data": 64, "fsdp": 16},
}


@pytest.fixture(params=MESHES)
def drawing(request, describe):
    return describe(**MESHES[request.param])


def count_shards(drawing, parameter, kind):
    """Return the shards of a parameter that device 0 stores, has or gathers (all), from the sizes of its axes."""
    count = 1
    for dim, axes in enumerate(parameter.sharded_axes):
        for axis in axes:
            if kind == "all" or axis in parameter.gathered_axes[dim]:
                count *= drawing.axis_sizes[axis]
    return count


@pytest.mark.parametrize("width", [400, 860])
def test_picture_is_complete_and_inside_its_frame(drawing, width):
    svg = render_drawing(drawing, width=width)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and drawing.mesh in root.get("aria-label", "")
    texts = collections.Counter(x.text for x in root.iter(f"{SVG}text"))
    parameters = [x for group in drawing.groups for x in group.parameters]
    lines = collections.Counter()
    for x in parameters:
        for dim, size, axes in zip(x.dims, x.shape, x.sharded_axes, strict=True):
            lines[f"{dim} {size:,}{' / ' * bool(axes)}{', '.join(axes)}"] += 1
    assert lines <= texts
    for move in drawing.moves:
        assert f"{move.phase}, {move.subject}" in texts and f"{move.collective} over {' x '.join(move.axes)}" in texts
    shades = collections.Counter()
    for path in root.iter(f"{SVG}path"):
        style = path.get("style", "")
        if "stroke-width: 0.4" in style:
            opacity = re.search(r"fill-opacity: ([\d.]+)", style)
            shades[opacity[1] if opacity else "none"] += path.get("d", "").count("M")
    stored = len(parameters) + 1  # and a sample of each in the legend
    gathered = sum(count_shards(drawing, x, "gathered") - 1 for x in parameters) + 1
    others = sum(count_shards(drawing, x, "all") - count_shards(drawing, x, "gathered") for x in parameters) + 1
    assert shades == {"0.75": stored, "0.3": gathered, "none": others}
    _, _, right, bottom = map(float, root.get("viewBox", "").split())
    assert right == width
    for path in root.iter(f"{SVG}path"):
        numbers = re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))
        assert all(0 <= float(x) <= right and 0 <= float(y) <= bottom for x, y in numbers)
    for element in root.iter(f"{SVG}text"):
        x = float(element.get("x", ""))
        length = 6.6 * len(element.text) * (15 / 11 if "15px" in element.get("style") else 1)
        start = x - length if "end" in element.get("style") else x
        assert 0 <= start <= start + length <= right + 24 and 0 < float(element.get("y", "")) < bottom, element.text


def test_shards_of_two_axes_are_gathered_along_one():
    assert _list_kinds([("fsdp", 2, True), ("tensor", 2, False)]) == ["stored", "other", "gathered", "other"]


def test_picture_of_adapters_marks_what_is_frozen():
    key = jax.random.key(0)
    model = eqx.filter_eval_shape(lambda: zoo.adapters.lora(zoo.models.Transformer(**SIZES, key=key), rank=4, key=key))
    svg = draw_layout(model, zoo.make_mesh(devices=jax.devices()[:1]))
    words = [x.text for x in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    query = words.index("query")
    assert words[query + 3] == "4.1 kB, frozen"
    down = words.index("query.lora.down")
    assert words[down + 3] == "512 B"
    assert any("float32, on one device" in text for text in words)


def test_picture_escapes_its_title_and_checks_its_sizes(describe):
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    svg = draw_layout(make_shapes(), mesh, title='<a> & "b"\x1b[2J', width=500)
    assert "\x1b" not in svg and ElementTree.fromstring(svg).get("aria-label", "").startswith('<a> & "b"')
    with pytest.raises(ValueError, match="at least 320 wide, not 100"):
        draw_layout(make_shapes(), mesh, width=100)
    drawing = describe(data=2, fsdp=2, tensor=2)
    large = dataclasses.replace(drawing, axis_sizes=drawing.axis_sizes | {"fsdp": 64, "tensor": 128})
    with pytest.raises(ValueError, match="has 8,192 shards, and a picture shows up to 4,096: draw a smaller mesh"):
        render_drawing(large)
