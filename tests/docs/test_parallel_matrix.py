"""The tables of mixers and mesh axes: complete, without a deviation, and as measured."""

import re

import numpy as np
import pytest

import zoo
from tests.docs.parallel_matrix import (
    AXES,
    COMMAND,
    LAYERS,
    MIXERS,
    PAGE,
    SIBLINGS,
    TABLES,
    find_deviation,
    format_cell,
    format_message,
    is_equal,
    make_mesh,
    measure,
    measure_or_raise,
    read_tables,
)
from tests.layers.random_layers import list_mixers


def test_tables_have_every_mixer_and_axis():
    assert {factory.func for factory in MIXERS.values()} == list_mixers() - SIBLINGS
    assert {axis for sizes in AXES.values() for axis in sizes} == set(zoo.parallel.layout.AXES)
    cells = read_tables(PAGE.read_text(encoding="utf-8"))
    assert cells.keys() == {(table, layer, axis) for table in TABLES for layer in LAYERS for axis in AXES}, COMMAND


def find_refusal(axis, table):
    """Return the message with which a mesh is refused, or None."""
    try:
        make_mesh(axis, table)
    except (NotImplementedError, ValueError) as error:
        return format_message(error)


def test_tables_hold_no_deviation_and_the_messages_raised():
    page = PAGE.read_text(encoding="utf-8")
    refusals = {(axis, table): find_refusal(axis, table) for axis in AXES for table in TABLES}
    for (table, layer, axis), text in read_tables(page).items():
        if message := refusals[axis, table]:
            number = re.fullmatch(r"raises \((\d+)\)", text)
            assert number and f"\n({number[1]}) {message}\n" in page, COMMAND
        else:
            assert re.fullmatch(r"0|\de-\d+( \(rounding \de-\d+\))?", text), (table, layer, axis, text)


def test_deviation_is_found_and_shown():
    expected = {"a": np.array([4.0, -2.0]), "b": np.array([1e-9])}
    assert find_deviation(expected, expected) == 0
    deviation = find_deviation({"a": np.array([4.0, -2.0012]), "b": np.array([2e-9])}, expected)
    assert deviation == pytest.approx(3e-4)
    assert find_deviation({"a": np.array([4.0, np.nan]), "b": expected["b"]}, expected) == np.inf
    equal = {"loss": 1e-7, "gradients": 3e-6, "rounding": 1e-6}
    assert is_equal(equal) and format_cell(equal, {}) == "3e-6"
    rounded = equal | {"gradients": deviation, "rounding": 4e-4}
    assert is_equal(rounded) and format_cell(rounded, {}) == "3e-4 (rounding 4e-4)"
    for wrong in ({"gradients": deviation}, {"loss": 2e-5}, {"loss": np.nan}):
        assert format_cell(equal | wrong, {}).startswith("**deviates")
    messages = {}
    refused = {"message": "`ValueError`: no"}
    assert [format_cell(refused, messages) for _ in range(2)] == ["raises (1)"] * 2 and len(messages) == 1


@pytest.mark.slow  # layers/attention/test_context.py has windows of a ring
def test_windowed_attention_of_sharded_tokens_equals_one_device():
    cell = measure("windowed attention", make_mesh("`SEQUENCE`", "Each axis with data 2 and tensor 2"))
    assert is_equal(cell) and 0 < cell["rounding"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_cell_equals_one_device_or_raises(name, table):
    for axis in AXES:
        cell = measure_or_raise(name, axis, table)
        assert "message" in cell if find_refusal(axis, table) else is_equal(cell), (axis, cell)
