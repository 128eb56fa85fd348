"""A mesh over any axes, also over those that `zoo.make_mesh` refuses as yet."""

import math

import jax
import numpy as np
from jax.sharding import AxisType

from zoo.parallel import AXES, Layout, Mesh


def make_any_mesh(layout=None, **sizes):
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES)), layout or Layout())
