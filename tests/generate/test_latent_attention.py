"""Decoding with latent attention from a cache of latents equals uncached forward passes, on one device and a mesh."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.generate.buckets import pad_prompt
from zoo.generate.decode import begin, decode_until, unstack_layers
from zoo.generate.request import DecodeOptions, Sampling
from zoo.layers import Attention, BiasedRouter, LatentAttention
from zoo.ops.rotary import Rotary
from zoo.parallel.spmd import _JITTED, run_jitted

VOCAB, PROMPT, NEW = 40, 6, 5
SIZES = {"vocab": VOCAB, "embed": 16, "layers": 2, "heads": 4, "mlp": 12, "experts": 4, "top": 2, "dense_layers": 1}


@eqx.filter_jit
def make_model(rotary):
    mixer = partial(LatentAttention, latent=8, head_dim=6, value_dim=5, query_latent=7, rotary=rotary)
    router = partial(BiasedRouter, groups=2, kept_groups=1)
    return zoo.models.MixtureOfExperts(**SIZES, mixer=mixer, router=router, shared=8, key=jax.random.key(0))


def generate_uncached(model, prompt):
    """Greedy tokens from full forward passes, all of one shape: attention is causal."""
    tokens = np.zeros((len(prompt), PROMPT + NEW), np.int32)
    tokens[:, :PROMPT] = prompt
    run = eqx.filter_jit(lambda model, tokens: model(tokens))
    for i in range(PROMPT, PROMPT + NEW):
        tokens[:, i] = run(model, tokens)[:, i - 1].argmax(-1)
    return tokens[:, PROMPT:]


@pytest.mark.slow  # weights/test_parity.py decodes DeepSeek-V3 from its cache
def test_latent_attention_decodes_as_uncached_and_on_a_mesh():
    model, prompt = make_model(Rotary(4)), np.random.default_rng(0).integers(0, VOCAB, (4, PROMPT))
    expected = generate_uncached(model, prompt)
    assert (zoo.generate(model, jnp.asarray(prompt), max_new_tokens=NEW) == expected).all()
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    on_mesh = zoo.generate(zoo.place(model, mesh), jnp.asarray(prompt), max_new_tokens=NEW, mesh=mesh)
    assert (on_mesh == expected).all()


@pytest.mark.slow
def test_latent_decode_step_updates_caches_in_place():
    model, options = make_model(Rotary(4)), DecodeOptions.of(Sampling(), VOCAB)
    prompt = pad_prompt(jnp.zeros((4, 16), jnp.int32), None, 4, 4096)
    state = run_jitted(begin, (model, options, jax.random.key(0)), (prompt, 4096))
    state_size = sum(x.nbytes for x in jax.tree.leaves(state))
    assert sum(x.nbytes for x in jax.tree.leaves(state.states)) < 2 * 4 * 4096 * (8 + 4 + 1) * 4 + 100
    fixed = unstack_layers(model, None), options
    program = _JITTED[True].lower((decode_until, fixed), (state, jnp.int32(9)), None).compile()
    memory = program.compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= state_size
    assert memory.temp_size_in_bytes < state_size / 2


@pytest.mark.parametrize(
    "options", [{"kv_heads": 2}, {"head_dim": 8}, {"rotary": Rotary(4)}, {"qk_norm": True}, {"windows": (4,)}], ids=str
)
def test_preset_refuses_attention_options_with_a_mixer(options):
    mixer = partial(LatentAttention, latent=8, head_dim=6, rotary=Rotary(4))
    with pytest.raises(ValueError, match=f"{next(iter(options))} is an option of Attention, and a mixer was given"):
        zoo.models.MixtureOfExperts(**SIZES, mixer=mixer, **options, key=jax.random.key(0))


def test_preset_takes_attention_as_mixer():
    shapes = eqx.filter_eval_shape(
        partial(zoo.models.MixtureOfExperts, **SIZES, mixer=partial(Attention, kv_heads=1)), key=jax.random.key(0)
    )
    assert next(shapes.stack.iter_blocks()).mixer.key.out_size == 4
