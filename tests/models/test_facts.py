"""A row is a view of a tensor for each of our parts: what is written through it is read through it, and lies where the
checkpoint has it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.models.hf.spec import TensorMapping, fused, prefixed
from zoo.weights.plan import invert_name_map

SIZES = st.sampled_from([1, 2, 3, 5])


@st.composite
def rows(draw, transposable=True):
    """The fields of a row, the shapes of its parts, and how many dims in front of them are stacked."""
    lead = tuple(draw(st.lists(SIZES, max_size=2)))
    per_group = draw(st.lists(SIZES, min_size=1, max_size=4))
    groups = draw(SIZES) if len(per_group) > 1 else 1
    rest = tuple(draw(st.lists(SIZES, max_size=1 if transposable else 2)))
    transposed = transposable and draw(st.booleans())
    fields = tuple("abcd"[: len(per_group)]), groups, transposed
    return fields, [(*lead, size * groups, *rest) for size in per_group], len(lead)


def slowly(row, parts, lead):
    """Their tensor from our parts, one group after another."""
    flat = [part.reshape(-1, *part.shape[lead:]) for part in parts]
    whole = []
    for stacked in range(len(flat[0])):
        found = []
        for group in range(row.groups):
            for part in flat:
                size = part.shape[1] // row.groups
                found.extend(part[stacked][group * size + i] for i in range(size))
        found = np.stack(found)
        whole.append(found.T if row.transposed else found)
    return np.stack(whole).reshape(*parts[0].shape[:lead], *whole[0].shape)


def numbered(shapes):
    """Arrays of these shapes in which no number occurs twice."""
    ends = np.cumsum([0, *map(np.prod, shapes)])
    return [np.arange(a, b).reshape(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)]


@given(rows())
def test_views_are_their_tensor_put_together_group_by_group(drawn):
    fields, shapes, lead = drawn
    row = TensorMapping(*fields)
    parts = numbered(shapes)
    expected = slowly(row, parts, lead)
    assert row.shape(shapes, lead) == expected.shape
    theirs = np.full(expected.shape, -1)
    for view, part in zip(row.views(theirs, shapes, lead), parts, strict=True):
        assert np.shares_memory(view, theirs) and view.size == part.size
        view[...] = part.reshape(view.shape)
    assert np.array_equal(theirs, expected)
    for view, part in zip(row.views(expected, shapes, lead), parts, strict=True):
        assert np.array_equal(view.reshape(part.shape), part)


@given(rows(transposable=False))
def test_views_of_tensors_of_more_dims(drawn):
    """Convolutions, (inner, 1, kernel), and norms, one dim, lie as they are."""
    fields, shapes, lead = drawn
    row = TensorMapping(*fields)
    parts = numbered(shapes)
    theirs = np.empty(row.shape(shapes, lead), int)
    for view, part in zip(row.views(theirs, shapes, lead), parts, strict=True):
        view[...] = part.reshape(view.shape)
    assert np.array_equal(theirs, slowly(row, parts, lead))


@given(rows())
def test_views_of_what_may_not_be_written_to_or_is_no_block_of_memory(drawn):
    """A mapped file is read only; a slice of another array has strides of its own."""
    fields, shapes, lead = drawn
    row = TensorMapping(*fields)
    expected = slowly(row, numbered(shapes), lead)
    around = np.full([2 * size + 1 for size in expected.shape], -1)
    theirs = around[tuple(slice(1, None, 2) for _ in expected.shape)]
    theirs[...] = expected
    theirs.flags.writeable = False
    for view, part in zip(row.views(theirs, shapes, lead), numbered(shapes), strict=True):
        assert np.array_equal(view.reshape(part.shape), part)
        assert np.shares_memory(view, around) and not view.flags.writeable


def test_known_fusions():
    """Of heads of 2: queries, keys and values head by head; side by side, (in, out); interleaved row by row."""
    query, key, value = (np.arange(4)[:, None] + 10 * i for i in range(3))
    shapes = [(4, 1)] * 3
    by_head = fused("query", "key", "value", groups=2)
    whole = np.empty((12, 1), int)
    for view, part in zip(by_head.views(whole, shapes, 0), (query, key, value), strict=True):
        view[...] = part.reshape(view.shape)
    assert whole[:, 0].tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]
    side_by_side = fused("query", "key", "value", transposed=True)
    assert side_by_side.shape(shapes, 0) == (1, 12) and side_by_side.shape([(4,)] * 3, 0) == (12,)
    rowwise = fused("query", "key", groups=4).views(whole[:8], shapes[:2], 0)
    assert rowwise[1].ravel().tolist() == [1, 11, 21, 3]


def test_dims_of_size_one_in_front():
    """Of a number for each expert, (experts,) here and (1, experts) there; of all layers in one, behind the layers."""
    row = TensorMapping(("bias",), leading_ones=1)
    assert row.shape([(4,)], 0) == (1, 4) and row.shape([(3, 4)], 1) == (3, 1, 4)
    for lead, shape in ((0, (4,)), (1, (3, 4))):
        theirs = np.zeros(row.shape([shape], lead))
        (view,) = row.views(theirs, [shape], lead)
        view[...] = np.arange(view.size).reshape(shape)
        assert view.shape == shape and np.array_equal(theirs.ravel(), np.arange(view.size))


def test_under_goes_down_on_both_sides_and_composes():
    rows = {"c_attn": fused("query", "key", groups=2, transposed=True), "c_proj": "out", "": "whole"}
    once = prefixed("h.*", "layers.*", prefixed("attn", "attention", rows))
    assert once == prefixed("h.*.attn", "layers.*.attention", rows)
    assert once["h.*.attn.c_attn"] == fused(
        "layers.*.attention.query", "layers.*.attention.key", groups=2, transposed=True
    )
    assert once["h.*.attn.c_proj"] == TensorMapping(("layers.*.attention.out",)) and "h.*.attn" in once
    assert prefixed("", "", once) == once
    assert prefixed("a", "", {"b": "c"}) == {"a.b": TensorMapping(("c",))} and prefixed("", "a", {"b": "c"}) == {
        "b": TensorMapping(("a.c",))
    }


@pytest.mark.parametrize("second", ["b", fused("c", "b"), fused("b", "b")])
def test_two_rows_for_one_part_raise(second):
    with pytest.raises(ValueError, match="two rows for b: x and y|two rows for b: y and y"):
        invert_name_map({"x": "a" if second == fused("b", "b") else "b", "y": second})
