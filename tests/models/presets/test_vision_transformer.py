"""ViT from scratch: its parameters, other sizes of images, and natural mistakes."""

from functools import partial

import equinox as eqx
import jax
import pytest

import zoo

SIZES = {"image_size": (8, 12), "patch_size": 4, "classes": 5, "embed": 16, "layers": 2, "heads": 4, "mlp": 24}
make = partial(zoo.models.VisionTransformer, **SIZES, key=jax.random.key(0))


def test_vision_transformer_has_vit_parameters():
    model = eqx.filter_eval_shape(make)
    patches, tokens = 16 * (3 * 4 * 4 + 1), 16 * (1 + 1 + 6)  # a class token, and positions of it and of six patches
    layer = 4 * 16 * 17 + 24 * 17 + 16 * 25 + 4 * 16
    assert zoo.count(model) == patches + tokens + 2 * layer + 2 * 16 + 5 * 17
    for shape in ((3, 3, 8, 12), (3, 3, 16, 10)):
        images = jax.ShapeDtypeStruct(shape, "float32")
        assert eqx.filter_eval_shape(lambda model, x: model(x), model, images).shape == (3, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "has at least 1 layer, not 0"),
        ({"patch_size": 9}, "an image of 8 x 12 pixels has no patch of 9 x 9"),
        ({"heads": 3}, "embed=16 does not divide evenly over 3 heads"),
    ],
)
def test_vision_transformer_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        eqx.filter_eval_shape(lambda: make(**changes))
