"""SVG of a layout: valid, complete, and inside its frame at any width."""

import xml.etree.ElementTree as ElementTree

import equinox as eqx
import jax
import pytest

import zoo
from tests.tools.draw.conftest import SIZES, make_shapes
from zoo.tools.draw import draw_layout
from zoo.tools.draw.elements import estimate_width
from zoo.tools.draw.svg import render_drawing

KEY = jax.random.key(0)
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


def find_style(element) -> tuple[float, bool]:
    kind = element.get("class", "").split()
    size = {"title": 16.0, "head": 13.0, "number": 9.0}
    return max((size.get(name, 0.0) for name in kind), default=0) or 11.0, bool({"title", "head", "name"} & set(kind))


@pytest.mark.parametrize("width", [400, 860])
def test_svg_is_complete_and_inside_its_frame(drawing, width):
    svg = render_drawing(drawing, width=width)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and drawing.mesh in root.findtext(f"{SVG}title", "")
    assert not any(word in svg for word in ("<script", "href", "url(", "@import", "@font-face"))
    pictures = [x for x in root.iter(f"{SVG}g") if x.get("class") == "parameter"]
    titles = [picture.findtext(f"{SVG}title", "") for picture in pictures]
    assert [title.partition(":")[0] for title in titles] == [x.name for x in drawing.parameters]
    for picture, parameter in zip(pictures, drawing.parameters, strict=True):
        paths = [x for x in picture.iter(f"{SVG}path") if "piece" in x.get("class", "")]
        assert sum(x.get("d", "").count("M") for x in paths) == parameter.count_shards(drawing.axis_sizes)
        stored = [x.get("d", "").count("M") for x in paths if "stored" in x.get("class", "")]
        assert stored == [1], "device 0 stores one shard"
        words = "".join(picture.itertext())
        assert all(axis in words for axes in parameter.sharded_axes for axis in axes)
    _, _, right, bottom = map(float, root.get("viewBox", "").split())
    assert right == width
    for element in root.iter(f"{SVG}rect"):
        x, y, wide, high = (float(element.get(name, "")) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= right and 0 <= y <= y + high <= bottom + 8
    for element in root.iter(f"{SVG}text"):
        if "transform" in element.attrib:
            continue
        x, y, words = float(element.get("x", "")), float(element.get("y", "")), "".join(element.itertext())
        size, bold = find_style(element)
        long = estimate_width(words, size, bold=bold)
        start = x - {"end": long, "number": long / 2}.get((element.get("class") or "").split(" ")[0], 0)
        assert 0 <= start <= start + long <= right + 2 and 0 < y < bottom, words


def test_svg_names_every_collective(drawing):
    svg = render_drawing(drawing)
    for group in drawing.groups:
        for move in (*group.moves, *(x for section in group.sections for x in section.moves)):
            if move.bytes > 64 * move.count:
                assert f"{move.collective} over {' x '.join(move.axes)}" in svg
    assert f"{len(drawing.groups[1].layers)} x " in svg


def test_svg_of_adapters_marks_what_is_frozen():
    model = eqx.filter_eval_shape(lambda: zoo.adapters.lora(zoo.models.Transformer(**SIZES, key=KEY), rank=4, key=KEY))
    root = ElementTree.fromstring(draw_layout(model, zoo.make_mesh(devices=jax.devices()[:1])))
    pictures = {x.findtext(f"{SVG}title", "").partition(":")[0]: x for x in root.iter(f"{SVG}g")}
    words = {name.removeprefix("layers.*.attention."): "".join(x.itertext()) for name, x in pictures.items()}
    assert "frozen" in words["query.weight"] and "frozen" not in words["query.lora.down.weight"]
    assert words["query.lora.scale"].strip().endswith("query.lora.scale"), "of a number its name is shown, and no size"
    assert "float32, on one device" in "".join(root.itertext())


def test_svg_escapes_its_title_and_checks_its_width():
    model = make_shapes()
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    svg = draw_layout(model, mesh, title='<a> & "b"\x1b[2J', width=500)
    assert "\x1b" not in svg and ElementTree.fromstring(svg).findtext(f"{SVG}title", "").startswith('<a> & "b"')
    with pytest.raises(ValueError, match="at least 320 wide, not 100"):
        draw_layout(model, mesh, width=100)
