"""Tensor mappings are views of a checkpoint tensor: writing through them equals concatenating our parts by group."""

import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import TensorMapping, either, fused, prefixed
from zoo.weights.plan import invert_name_map, plan_tensors

from .configs import build, small

SIZES = st.sampled_from([1, 2, 3, 5])


@st.composite
def mappings(draw, transposable=True):
    """Draw the fields of a mapping, the shapes of its parts, and the number of stacked leading dims."""
    lead = tuple(draw(st.lists(SIZES, max_size=2)))
    per_group = draw(st.lists(SIZES, min_size=1, max_size=4))
    groups = draw(SIZES) if len(per_group) > 1 else 1
    rest = tuple(draw(st.lists(SIZES, max_size=1 if transposable else 2)))
    transposed = transposable and draw(st.booleans())
    fields = tuple("abcd"[: len(per_group)]), groups, transposed
    return fields, [(*lead, size * groups, *rest) for size in per_group], len(lead)


def concatenate_groups(mapping, parts, lead):
    """Build the checkpoint tensor from our parts, group by group."""
    flat = [part.reshape(-1, *part.shape[lead:]) for part in parts]
    tensors = []
    for stacked in range(len(flat[0])):
        rows = []
        for group in range(mapping.groups):
            for part in flat:
                size = part.shape[1] // mapping.groups
                rows.extend(part[stacked][group * size + i] for i in range(size))
        rows = np.stack(rows)
        tensors.append(rows.T if mapping.transposed else rows)
    return np.stack(tensors).reshape(*parts[0].shape[:lead], *tensors[0].shape)


def distinct_arrays(shapes):
    """Return integer arrays of these shapes with all values distinct."""
    ends = np.cumsum([0, *map(np.prod, shapes)])
    return [np.arange(a, b).reshape(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)]


@given(mappings())
@example(((("a",), 1, True), [(3, 3)], 0))  # a square matrix has the same shape transposed
def test_mapping_views_equal_concatenated_groups(drawn):
    fields, shapes, lead = drawn
    mapping = TensorMapping(*fields)
    parts = distinct_arrays(shapes)
    expected = concatenate_groups(mapping, parts, lead)
    assert mapping.shape(shapes, lead) == expected.shape
    tensor = np.full(expected.shape, -1)
    for view, part in zip(mapping.views(tensor, shapes, lead), parts, strict=True):
        assert np.shares_memory(view, tensor) and view.size == part.size
        view[...] = part.reshape(view.shape)
    assert np.array_equal(tensor, expected)
    for view, part in zip(mapping.views(expected, shapes, lead), parts, strict=True):
        assert np.array_equal(view.reshape(part.shape), part)


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
@pytest.mark.parametrize(
    ("options", "shapes", "join"),
    [
        ({"flat": True}, [(3, 2)], lambda parts, lead: parts[0].reshape(*lead, 6)),
        ({"stacked": True}, [(3,), (3,)], lambda parts, lead: np.stack(parts, len(lead))),
        ({"columns": True}, [(3, 2), (3, 4)], lambda parts, lead: np.concatenate(parts, -1)),
        ({"in_dims": (2, 1, 3)}, [(4, 6)], lambda parts, lead: parts[0].reshape(*lead, 4, 2, 1, 3)),
        ({"in_dims": (2, 1, 3)}, [(4,)], lambda parts, lead: parts[0]),
    ],
    ids=["flat", "stacked", "columns", "convolution", "bias of a convolution"],
)
def test_parts_that_are_joined_otherwise(options, shapes, join, lead):
    parts = distinct_arrays([(*lead, *shape) for shape in shapes])
    expected = join(parts, lead)
    mapping = TensorMapping(tuple("ab"[: len(parts)]), **options)
    shapes = [part.shape for part in parts]
    assert mapping.shape(shapes, len(lead)) == expected.shape
    tensor = np.empty_like(expected)
    for view, part in zip(mapping.views(tensor, shapes, len(lead)), parts, strict=True):
        view[...] = part.reshape(view.shape)
    assert np.array_equal(tensor, expected)


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_matrices_per_head_have_a_dim_of_heads(lead):
    """A matrix (heads * out, in) is stored as (heads, in, out), and its bias as (heads, out)."""
    heads, out, in_ = 3, 2, 5
    mapping = TensorMapping(("gate",), heads, transposed=True, per_head=True)
    for shape, stored in (((heads * out, in_), (heads, in_, out)), ((heads * out,), (heads, out))):
        (part,) = distinct_arrays([(*lead, *shape)])
        assert mapping.shape([part.shape], len(lead)) == (*lead, *stored)
        tensor = np.empty((*lead, *stored), int)
        (view,) = mapping.views(tensor, [part.shape], len(lead))
        view[...] = part.reshape(view.shape)
        by_head = part.reshape(*lead, heads, out, *shape[1:])
        expected = by_head.swapaxes(-1, -2) if len(stored) == 3 else by_head
        np.testing.assert_array_equal(tensor, expected)
        assert np.shares_memory(view, tensor)


@given(lead=st.sampled_from([(), (2,)]), sizes=st.tuples(SIZES, SIZES, SIZES), rest=st.sampled_from([(), (4,)]))
def test_rows_in_runs_are_those_of_groups_in_another_order(lead, sizes, rest):
    """(runs, groups, rows) in the file, (groups, runs, rows) here."""
    runs, groups, rows = sizes
    mapping = TensorMapping(("query",), groups, runs=runs)
    (part,) = distinct_arrays([(*lead, runs * groups * rows, *rest)])
    assert mapping.shape([part.shape], len(lead)) == part.shape
    tensor = np.empty(part.shape, int)
    (view,) = mapping.views(tensor, [part.shape], len(lead))
    assert np.shares_memory(view, tensor)
    view[...] = part.reshape(view.shape)
    by_group = part.reshape(*lead, groups, runs, rows, *rest)
    expected = by_group.swapaxes(len(lead), len(lead) + 1).reshape(part.shape)
    np.testing.assert_array_equal(tensor, expected)


@given(mappings(transposable=False))
def test_mapping_views_of_tensors_of_more_dims(drawn):
    """Convolutions, (inner, 1, kernel), and norms, one dim, are stored unchanged."""
    fields, shapes, lead = drawn
    mapping = TensorMapping(*fields)
    parts = distinct_arrays(shapes)
    tensor = np.empty(mapping.shape(shapes, lead), int)
    for view, part in zip(mapping.views(tensor, shapes, lead), parts, strict=True):
        view[...] = part.reshape(view.shape)
    assert np.array_equal(tensor, concatenate_groups(mapping, parts, lead))


@given(mappings())
def test_mapping_views_of_read_only_or_strided_memory(drawn):
    """A memory-mapped file is read-only; a slice of a larger array is not contiguous."""
    fields, shapes, lead = drawn
    mapping = TensorMapping(*fields)
    expected = concatenate_groups(mapping, distinct_arrays(shapes), lead)
    around = np.full([2 * size + 1 for size in expected.shape], -1)
    tensor = around[tuple(slice(1, None, 2) for _ in expected.shape)]
    tensor[...] = expected
    tensor.flags.writeable = False
    for view, part in zip(mapping.views(tensor, shapes, lead), distinct_arrays(shapes), strict=True):
        assert np.array_equal(view.reshape(part.shape), part)
        assert np.shares_memory(view, around) and not view.flags.writeable


def test_mapping_of_known_fusions():
    """Heads of 2: QKV fused per head; concatenated and stored (in, out); interleaved row by row."""
    query, key, value = (np.arange(4)[:, None] + 10 * i for i in range(3))
    shapes = [(4, 1)] * 3
    per_head = fused("query", "key", "value", groups=2)
    qkv = np.empty((12, 1), int)
    for view, part in zip(per_head.views(qkv, shapes, 0), (query, key, value), strict=True):
        view[...] = part.reshape(view.shape)
    assert qkv[:, 0].tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]
    concatenated = fused("query", "key", "value", transposed=True)
    assert concatenated.shape(shapes, 0) == (1, 12) and concatenated.shape([(4,)] * 3, 0) == (12,)
    interleaved = fused("query", "key", groups=4).views(qkv[:8], shapes[:2], 0)
    assert interleaved[1].ravel().tolist() == [1, 11, 21, 3]


def test_mapping_leading_dims_of_size_one():
    """One value per expert: (experts,) here, (1, experts) in files; after the stacked layers if there are any."""
    mapping = TensorMapping(("bias",), leading_ones=1)
    assert mapping.shape([(4,)], 0) == (1, 4) and mapping.shape([(3, 4)], 1) == (3, 1, 4)
    for lead, shape in ((0, (4,)), (1, (3, 4))):
        tensor = np.zeros(mapping.shape([shape], lead))
        (view,) = mapping.views(tensor, [shape], lead)
        view[...] = np.arange(view.size).reshape(shape)
        assert view.shape == shape and np.array_equal(tensor.ravel(), np.arange(view.size))


def test_mapping_trailing_dims_of_size_one():
    """One slope per head: (heads,) here, (heads, 1, 1) in files; after the stacked layers if there are any."""
    mapping = TensorMapping(("slopes",), trailing_ones=2)
    assert mapping.shape([(4,)], 0) == (4, 1, 1) and mapping.shape([(3, 4)], 1) == (3, 4, 1, 1)
    for lead, shape in ((0, (4,)), (1, (3, 4))):
        tensor = np.zeros(mapping.shape([shape], lead))
        (view,) = mapping.views(tensor, [shape], lead)
        view[...] = np.arange(view.size).reshape(shape)
        assert view.shape == shape and np.array_equal(tensor.ravel(), np.arange(view.size))


def test_either_maps_one_name_to_layers_of_two_classes():
    attention = prefixed("mixer", "attention", {"q": "query", "o": "out"})
    recurrence = prefixed("mixer", "recurrence", {"q": fused("query", "gate"), "norm": "norm"})
    names = prefixed("layers.*", "layers.*", either(attention, recurrence))
    inverse = invert_name_map(names)
    assert {ours: (theirs, part) for ours, (theirs, _, part) in inverse.items()} == {
        "layers.*.attention.query": ("layers.*.mixer.q", 0),
        "layers.*.attention.out": ("layers.*.mixer.o", 0),
        "layers.*.recurrence.query": ("layers.*.mixer.q", 0),
        "layers.*.recurrence.gate": ("layers.*.mixer.q", 1),
        "layers.*.recurrence.norm": ("layers.*.mixer.norm", 0),
    }
    assert either(attention) == attention
    with pytest.raises(ValueError, match=r"two rows for layers.\*.norm: layers.\*.a and layers.\*.b"):
        invert_name_map(prefixed("layers.*", "layers.*", either({"a": "norm"}, {"b": "norm"})))


def test_prefixed_prepends_on_both_sides_and_composes():
    names = {"c_attn": fused("query", "key", groups=2, transposed=True), "c_proj": "out", "": "module"}
    nested = prefixed("h.*", "layers.*", prefixed("attn", "attention", names))
    assert nested == prefixed("h.*.attn", "layers.*.attention", names)
    assert nested["h.*.attn.c_attn"] == fused(
        "layers.*.attention.query", "layers.*.attention.key", groups=2, transposed=True
    )
    assert nested["h.*.attn.c_proj"] == TensorMapping(("layers.*.attention.out",)) and "h.*.attn" in nested
    assert prefixed("", "", nested) == nested
    assert prefixed("a", "", {"b": "c"}) == {"a.b": TensorMapping(("c",))} and prefixed("", "a", {"b": "c"}) == {
        "b": TensorMapping(("a.c",))
    }


@pytest.mark.parametrize("second", ["b", fused("c", "b"), fused("b", "b")])
def test_name_map_with_two_tensors_for_one_part_raises(second):
    with pytest.raises(ValueError, match="two rows for b: x and y|two rows for b: y and y"):
        invert_name_map({"x": "a" if second == fused("b", "b") else "b", "y": second})


def test_modules_of_their_own_are_not_among_ignored_tensors():
    names = ("mtp.fc.weight", "model.mtp.layers.0.norm.weight", "model.mtp_block.0.norm.weight")
    for family in FAMILIES.values():
        wrong = [name for name in names if any(re.search(pattern, name) for pattern in family.ignored_tensors)]
        assert not wrong, f"{family.name}: name {wrong} in other_modules, so that saving can write them back"


@pytest.mark.parametrize("family", [family for family in FAMILIES.values() if family.memory_names], ids=str)
def test_names_in_memory_cover_every_parameter(family):
    given = small(family)
    config, model = read_config(family, given), build(family, given)
    files, memory = (plan_tensors(model, names(config)) for names in (family.names, family.memory_names))
    list_leaves = lambda plans: sorted({piece.leaf for plan in plans.values() for piece in plan.slices})
    assert list_leaves(memory) == list_leaves(files) and memory.keys() != files.keys()
