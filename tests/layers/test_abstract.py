"""Abstract layers: a mixer that cannot compute a shard of the sequence, or attend to later tokens, raises by name."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import list_mixers
from zoo.layers import (
    AbstractMixer,
    AlibiAttention,
    Attention,
    DifferentialAttention,
    ForgettingAttention,
    GatedAttention,
    GatedDeltaNet,
    MixtureOfBlockAttention,
    TokenInfo,
)
from zoo.layers.abstract import run_mixer


class Reversal(AbstractMixer):
    """Reads the sequence from its end, of which a device has a shard."""

    def __call__(self, x, info, state=None):
        return x[:, ::-1], None

    def init_state(self, batch, length, dtype=jnp.float32):
        return ()


def test_every_mixer_takes_a_shard_of_the_sequence():
    mixers = list_mixers()
    assert len(mixers) >= 19
    whole = {mixer.__name__ for mixer in mixers if not mixer.shards_sequence}
    assert whole <= {"DisentangledAttention"}, "only DeBERTa's attention needs all tokens of a row"


def test_mixer_of_whole_sequences_is_named():
    model = zoo.models.Hybrid(
        vocab=8, embed=4, layers=1, pattern=[lambda embed, **options: Reversal()], key=jax.random.key(0)
    )
    batch = {"tokens": jnp.zeros((2, 8), int), "targets": jnp.zeros((2, 8), int)}
    mesh = zoo.make_mesh(1, context=2, devices=jax.devices()[:2])
    with pytest.raises(NotImplementedError, match="Reversal cannot mix a sequence that is sharded over context=2"):
        zoo.value(zoo.cross_entropy, mesh)(model, batch)


AHEAD = TokenInfo(lookahead=jnp.array([[3, 0, 0, 0]]))


@pytest.mark.parametrize("mixer", [Attention, GatedAttention, ForgettingAttention, DifferentialAttention])
def test_mixers_that_look_ahead_read_later_tokens(mixer):
    layer = mixer(8, 2, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, 4, 8))
    y, plain = (run_mixer(layer, x, info)[0] for info in (AHEAD, TokenInfo()))
    assert not jnp.allclose(y[:, 0], plain[:, 0], atol=1e-4)
    assert jnp.allclose(y[:, 1:], plain[:, 1:], atol=1e-5)


@pytest.mark.parametrize("mixer", [partial(MixtureOfBlockAttention, block=2, top=2), AlibiAttention, GatedDeltaNet])
def test_mixers_that_do_not_look_ahead_raise(mixer):
    layer = mixer(8, 2, key=jax.random.key(0))
    with pytest.raises(NotImplementedError, match=f"{type(layer).__name__} does not look ahead"):
        run_mixer(layer, jnp.zeros((1, 4, 8)), AHEAD)
