"""Target modules: errors suggest similar names."""

import equinox as eqx
import jax
import pytest

import zoo
from zoo import adapters
from zoo.models.targets import matches

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "querry"}, "'querry'. Is it query"),
        ({"targets": ()}, "targets names no module"),
        ({"targets": "("}, "is neither a name nor a valid pattern"),
        ({"targets": lambda name: False}, "takes none of the model's 15 matrices"),
        ({"rank": 0}, "a rank is at least 1, not 0"),
        ({"rank_pattern": {"query": 0}}, "a rank is at least 1, not 0"),
        ({"alpha_pattern": {"qery": 2}}, "'qery'. Is it query"),
    ],
)
def test_lora_with_wrong_targets_or_ranks_raises(options, message):
    make = lambda: zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, key=KEY)
    model = eqx.filter_eval_shape(make)
    with pytest.raises(ValueError, match=message):
        adapters.lora(model, key=KEY, **options)


def test_predictors_are_targets_only_by_their_name():
    """Also of a path that ends as a layer's of the model does."""
    inner = "predictors.0.layers.0.attention.query"
    for target in ("all-linear", "query", "layers.0.attention.query", r".*\.query"):
        assert matches(target, "layers.0.attention.query") and not matches(target, inner)
    assert matches(r"predictors\..*", inner) and matches(inner, inner)


def test_all_linear_leaves_out_the_head_beside_a_tower():
    assert not matches("all-linear", "decoder.head") and not matches("all-linear", "decoder.embedding")
    assert matches("all-linear", "decoder.layers.0.attention.query") and matches("decoder.head", "decoder.head")
