"""Abstract layers: every mixer takes a shard of the sequence, and one that needs all of it raises by name."""

import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import list_mixers
from zoo.layers import AbstractMixer


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
