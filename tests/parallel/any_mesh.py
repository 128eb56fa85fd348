"""A mesh over as many of the first devices as its sizes need."""

import math

import jax

import zoo


def make_any_mesh(layout=None, **sizes):
    return zoo.make_mesh(**{"data": 1} | sizes, devices=jax.devices()[: math.prod(sizes.values())], layout=layout)
