"""A model in one line, and every parameter of it in a table."""

import xml.etree.ElementTree as ET
from functools import partial

import equinox as eqx
import jax
import numpy as np

import zoo
from zoo import Layout
from zoo.layers import Attention, GatedDeltaNet
from zoo.tools.report import describe_model, tabulate_parameters, write_report

SIZES = {"vocab": 64, "embed": 16, "layers": 4, "mlp": 32}


def make_shapes(make, **options):
    return eqx.filter_eval_shape(lambda key: make(**SIZES | options, key=key), jax.random.key(0))


def test_report_shows_public_names_and_every_digit(tmp_path):
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    model = make_shapes(
        zoo.models.Hybrid, pattern=[partial(Attention, heads=2), partial(Attention, heads=2, kv_heads=1)]
    )
    rows = {row.name: row for row in tabulate_parameters(model, mesh)}
    names = [*rows]
    assert names[0] == "embedding.weight" and rows["layers.*.attention.query.weight"].shape == "4 x 16 x 16"
    for name, size in {"(0-2 by 2)": 16, "(1-3 by 2)": 8}.items():
        row = rows[f"layers.*.attention.key.weight {name}"]
        assert row.shape == f"2 x {size} x 16" and row.bytes == 4 * row.count == 4 * 2 * size * 16
    assert not any("segments" in name for name in names)
    assert tabulate_parameters({"a": np.ones(3), "b": np.ones(2)}, mesh)[1].name == "b"
    page = write_report(
        tmp_path, title="t", summary="s", curves={}, unit="nats", parameters=[*rows.values()]
    ).read_text()
    table = ET.fromstring(page.removeprefix("<!DOCTYPE html>")).find(
        ".//div[@class='scroll']/table[@class='parameters']"
    )
    cells = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert cells[0] == ["name, dims, layout", "shape", "dtype", "count", "bytes"]
    for row, cell in zip(rows.values(), cells[1:-1], strict=True):
        assert cell[0] == f"{row.name}{row.dims}; {row.layout}" and cell[-2:] == [f"{row.count:,}", f"{row.bytes:,}"]


def test_model_in_one_line():
    model = make_shapes(zoo.models.Transformer, heads=2)
    assert describe_model(model) == f"4 layers of Attention and GatedMLP; {zoo.count(model):,} parameters"
    mixers = [partial(GatedDeltaNet, heads=2), partial(GatedDeltaNet, heads=2), partial(Attention, heads=2)]
    layers = describe_model(make_shapes(zoo.models.Hybrid, pattern=mixers)).partition(";")[0]
    delta, attention = ("GatedDeltaNet and GatedMLP", "Attention and GatedMLP")
    assert layers == f"2 layers of {delta}, 1 layer of {attention}, 1 layer of {delta}"
    many = make_shapes(zoo.models.Hybrid, pattern=mixers, layers=30)
    assert describe_model(many).startswith(f"20 layers of {delta}, 10 layers of {attention}; ")
    assert describe_model({"a": np.ones(3)}) == "dict, 3 parameters"


def test_tabulate_parameters_shows_sharding():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    shapes = make_shapes(zoo.models.Transformer, heads=2, tied=False)
    rows = {row.name: row for row in tabulate_parameters(shapes, mesh)}
    row = rows["layers.*.attention.query.weight"]
    assert row[1:4] == ("4 x 16 x 16", "layers heads embed", "heads over tensor, embed over fsdp")
    assert row[4:] == ("float32", 1024, 4096)
    assert rows["head.weight"].layout == "vocab over tensor, embed over fsdp"
    assert sum(row.count for row in rows.values()) == zoo.count(shapes)


def test_tabulate_parameters_shows_layers_in_one_round():
    four = zoo.models.Transformer(vocab=16, embed=8, layers=4, heads=2, mlp=8, key=jax.random.key(0))
    mesh = zoo.make_mesh(data=1, pipe=2, fsdp=2, tensor=2, layout=Layout(rounds=2))
    rows = tabulate_parameters(zoo.place(four, mesh), mesh)
    assert rows == tabulate_parameters(four, mesh)
    row = next(row for row in rows if row.name == "layers.*.gated_mlp.up.weight")
    assert row[1:4] == ("4 x 8 x 8", "layers mlp embed", "layers over pipe, mlp over tensor, embed over fsdp")
