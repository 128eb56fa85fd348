"""Noise on trainable parameters, so that an adapter changes the output of its base."""

import equinox as eqx
import jax

import zoo


def perturb(model, scale=0.1):
    """Add normal noise to the trainable parameters of a model."""
    noise = lambda x: x + scale * jax.random.normal(jax.random.key(x.size), x.shape)
    return eqx.combine(jax.tree.map(noise, zoo.trainable(model)), model)
