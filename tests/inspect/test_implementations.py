"""The table of implementations: what each layer gets on a platform, which layers, and why not another."""

import json
from functools import partial

import equinox as eqx
import jax
import pytest

import zoo
from zoo.inspect import implementations
from zoo.inspect.implementations import format_ranges
from zoo.layers import Attention, GatedDeltaNet
from zoo.models import Hybrid, MixtureOfExperts
from zoo.ops.attention import reference_attention
from zoo.ops.implementations import _observer


@pytest.fixture(scope="module")
def hybrid():
    pattern = [partial(GatedDeltaNet, heads=2)] * 3 + [partial(Attention, heads=2)]
    make = partial(Hybrid, vocab=32, embed=16, layers=8, mlp=32, pattern=pattern)
    return eqx.filter_eval_shape(make, key=jax.random.key(0))


def find_row(table, layer):
    return next(row for row in table.rows if row.layer == layer)


def test_table_of_a_platform_that_is_not_here(hybrid):
    table = implementations(hybrid, platform="tpu", seq_len=32)
    attention, delta = find_row(table, "Attention"), find_row(table, "GatedDeltaNet")
    assert (table.platform, attention.layers, delta.layers) == ("tpu", (3, 7), (0, 1, 2, 4, 5, 6))
    assert attention.is_auto and attention.chosen not in ("cudnn", "reference")
    assert attention.reasons["cudnn"] == "it runs on GPU, and this is compiled for TPU"
    assert "layers 0-2, 4-6): chunked\n    not " in str(table)
    assert table.loop.startswith("scan") and f"loop over layers: {table.loop}" in str(table)
    assert "\nloss: chunked\n    not " in str(table) and find_row(table, "").layers == ()
    assert _observer.get() is None


def test_table_of_decoding_and_of_names(hybrid):
    assert find_row(implementations(hybrid, seq_len=32, decoding=True), "GatedDeltaNet").chosen == "recurrent"
    named = zoo.set_implementations(hybrid, attention="reference")
    row = find_row(implementations(named, seq_len=32), "Attention")
    assert (row.chosen, row.is_auto) == ("reference", False)
    assert 'reference was named; "auto" would take this one' in row.reasons.values()


def test_table_of_a_mesh_has_its_shards():
    shapes = []

    def spy(query, key, value, *args, **kwargs):
        shapes.append(query.shape)
        return reference_attention(query, key, value, *args, **kwargs)

    make = partial(MixtureOfExperts, vocab=32, embed=16, layers=2, heads=4, mlp=8, experts=4, top=2, implementation=spy)
    model = eqx.filter_eval_shape(make, key=jax.random.key(0))
    table = implementations(model, mesh=zoo.make_mesh(1, 2, tensor=4), batch=4, seq_len=8)
    assert set(shapes) == {(2, 8, 1, 4)}
    assert (find_row(table, "Attention").chosen, find_row(table, "MixtureOfExperts").chosen) == ("spy", "padded")
    assert json.loads(json.dumps(table.as_dict()))["rows"][0]["layers"] == [0, 1]
    with pytest.raises(ValueError, match="a mesh has a platform"):
        implementations(model, mesh=zoo.make_mesh(), platform="tpu")


def test_table_raises_as_the_model_does(hybrid):
    named = zoo.set_implementations(hybrid, attention="cudnn")
    with pytest.raises(ValueError, match="'cudnn' cannot compute this, because it runs on GPU"):
        implementations(named, seq_len=32)
    with pytest.raises(ValueError, match=r"implementations takes the model apart, and an edit of layers.1"):
        implementations(zoo.patch(hybrid, {"layers.1": lambda x: x}), seq_len=32)
    assert format_ranges([0, 1, 2, 4]) == "0-2, 4"
