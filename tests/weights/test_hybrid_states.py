"""Hold the states of hybrids to their promise: caches of attention grow with the text, and recurrent states do not."""

import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo.layers import TokenInfo
from zoo.layers.kv_cache import KeyValueCache

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
CASES = ("bamba", "granitemoehybrid", "granitemoehybrid_dense", "jamba", "nemotron_h", "nemotron_h_moe")
ATTENTION_LAYERS = {**dict.fromkeys(CASES, 1), "falcon_h1": 2, "zamba": 2, "zamba2": 3}
"""Layers of each case that have a cache. All of them have a recurrence, too."""
ROWS = 2


def measure(states):
    """Return the number of caches, their bytes, and the bytes of all other states."""
    is_cache = lambda state: isinstance(state, KeyValueCache)
    parts = jax.tree.leaves(states, is_leaf=is_cache)
    caches = [part for part in parts if is_cache(part)]
    count_bytes = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return len(caches), count_bytes(caches), count_bytes(parts) - count_bytes(caches)


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_only_caches_grow_with_the_text(name):
    """A cache has a slot for each token; a recurrence has what one token leaves behind, after one or after many."""
    model = zoo.load(FIXTURES / name, dtype=jnp.float32)
    lengths = (8, 16, 4096)
    states = [eqx.filter_eval_shape(model.init_state, ROWS, length) for length in lengths]
    counts, caches, recurrent = zip(*map(measure, states), strict=True)
    assert set(counts) == {ATTENTION_LAYERS[name]}
    assert len(set(recurrent)) == 1 and recurrent[0] > 0
    per_token = (caches[1] - caches[0]) // (lengths[1] - lengths[0])
    assert caches[2] - caches[1] == per_token * (lengths[2] - lengths[1]) > 0
    assert per_token == count_token_bytes(json.loads((FIXTURES / name / "config.json").read_text())) * counts[0]

    tokens = jnp.zeros((ROWS, 5), int)
    info = TokenInfo(positions=jnp.broadcast_to(jnp.arange(5), tokens.shape))
    _, states = eqx.filter_eval_shape(model.hidden, tokens, info, model.init_state(ROWS, 8))
    assert measure(states) == (counts[0], caches[0], recurrent[0]), "reading a text changes no size"


def test_windows_and_recurrences_have_states_of_one_size():
    """A cache of a window has no more slots than the window has tokens."""
    model = zoo.load(FIXTURES / "recurrent_gemma", dtype=jnp.float32)
    states = [eqx.filter_eval_shape(model.init_state, ROWS, length) for length in (8, 4096)]
    assert measure(states[0])[0] == 1 and measure(states[0]) == measure(states[1])


def count_token_bytes(config):
    """Bytes of one token in one cache of float32: a key and a value per KV head, and the token's position."""
    head_dim = (
        config.get("head_dim")
        or config.get("attention_head_dim")
        or config["hidden_size"] // config["num_attention_heads"]
    )
    return ROWS * (4 * 2 * config["num_key_value_heads"] * head_dim + 4)
