"""Factories of parts: options are passed to those that take them, and a call that cannot work is refused by name."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import AbstractMixer, Attention, GatedDeltaNet, GatedMLP, Linear, RMSNorm
from zoo.models.factories import bind_factory
from zoo.parallel import Dim

KEY = jax.random.key(0)


class ChannelMixer(AbstractMixer):
    """y = W x, per token: a mixer as a user writes one, without `out_scale`."""

    out: Linear

    def __init__(self, embed: int, inner: int, *, key):
        self.out = Linear(embed, embed, in_=Dim("embed"), out=Dim("embed_out"), scale=inner, key=key)

    def init_state(self, batch, length, dtype=jnp.float32):
        return jnp.zeros((batch, 0))

    def __call__(self, x, info, state=None):
        return self.out(x), state


def hybrid(**options):
    return zoo.models.Hybrid(vocab=8, embed=4, layers=2, key=KEY, **options)


def test_options_go_to_factories_that_take_them():
    scaled = partial(GatedMLP, activation=jnp.tanh)
    assert bind_factory("mixer", scaled, 4, 8, out_scale=0.5, heads=2).keywords == {
        "activation": jnp.tanh,
        "out_scale": 0.5,
    }
    assert bind_factory("mixer", ChannelMixer, 4, 8, out_scale=0.5).keywords == {}
    assert bind_factory("mixer", lambda embed, **options: None, 4, out_scale=0.5).keywords == {"out_scale": 0.5}
    assert bind_factory("mixer", lambda *sizes, out_scale, key: None, 4, out_scale=0.5, heads=2).args == (4,)


def test_an_option_that_a_partial_sets_stays():
    """Hybrid overwrote it."""
    made = [hybrid(pattern=[partial(GatedDeltaNet, heads=2, out_scale=scale)]) for scale in (0.25, 0.5)]
    small, large = (model.stack.segments[0].blocks[0].mixer.readout.out.weight for model in made)
    np.testing.assert_allclose(2 * small, large, rtol=1e-6)


def test_a_mixer_without_out_scale_is_not_scaled():
    """Layers of a mixer of one's own, in Hybrid and in Transformer, equal the mixer made alone."""
    mixer = partial(ChannelMixer, inner=1)
    tokens = jnp.arange(6).reshape(1, 6)
    model = zoo.models.Transformer(vocab=8, embed=4, layers=2, heads=2, mlp=8, mixer=mixer, key=KEY)
    block_keys = jax.random.split(jax.random.split(KEY, 3)[1], 2)
    expected = [mixer(4, key=jax.random.split(key)[0]).out.weight for key in block_keys]
    np.testing.assert_array_equal(model.stack.segments[0].blocks[0].mixer.out.weight, jnp.stack(expected))
    assert jnp.isfinite(model(tokens)).all()
    in_hybrid = hybrid(pattern=[mixer]).stack.segments[0].blocks[0].mixer.out.weight
    np.testing.assert_array_equal(in_hybrid, jnp.stack(expected))


@pytest.mark.parametrize(
    "pattern, message",
    [
        (ChannelMixer, r"ChannelMixer\(4, key=key\), but it takes \(embed, inner, key\): missing .* 'inner'"),
        (partial(ChannelMixer, inner=1, width=3), r"unexpected keyword argument 'width'"),
        (partial(Attention), r"missing a required argument: 'heads'"),
        (ChannelMixer(4, 1, key=KEY), r"not a layer, ChannelMixer"),
        (partial(ChannelMixer(4, 1, key=KEY)), r"not a layer, ChannelMixer"),
        ("attention", r"not 'attention'"),
    ],
)
def test_a_factory_that_cannot_be_called_is_refused_before_it_is(pattern, message):
    with pytest.raises(TypeError, match=rf"^pattern: .*{message}"):
        hybrid(pattern=[pattern])


def test_build_decoder_refuses_a_factory_that_lacks_sizes():
    make = partial(zoo.models.build_decoder, vocab=8, embed=4, norm=partial(RMSNorm, 4), tied=True, key=KEY)
    with pytest.raises(TypeError, match=r"^mixer: ChannelMixer is called as ChannelMixer\(key=key\)"):
        make(layers=[(ChannelMixer, None)])
    with pytest.raises(TypeError, match=r"^feed-forward layer: GatedMLP is called as GatedMLP\(4, key=key\)"):
        make(layers=[(partial(ChannelMixer, 4, 1), partial(GatedMLP, 4))])


def test_transformer_takes_any_mixer_instead_of_its_attention():
    make = partial(zoo.models.Transformer, vocab=32, embed=16, layers=2, heads=4, mlp=24, key=KEY)
    shapes = eqx.filter_eval_shape(partial(make, mixer=GatedDeltaNet))
    mixer = shapes.stack.segments[0].blocks[0].mixer
    assert isinstance(mixer, GatedDeltaNet)
    assert mixer.readout.out.weight.shape == (2, 16, 16)
    with pytest.raises(ValueError, match="windows is an option of Attention"):
        make(mixer=GatedDeltaNet, windows=(4,))
    with pytest.raises(ValueError, match="heads=4, and the mixer was given heads=2"):
        make(mixer=partial(GatedDeltaNet, heads=2))
