"""Linear layers that are trained in FP8: their parameters stay in high precision, their products are quantized."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.ops.quantized.recipe import AbstractRecipe
from zoo.ops.quantized.scaled_grouped_matmul import scaled_grouped_matmul
from zoo.ops.quantized.scaled_matmul import AmaxArrays, MeasuredAxes, NoiseKeys, scaled_matmul
from zoo.ops.varying import varying
from zoo.parallel import Dim, Module, num_shards, reduce
from zoo.parallel.collectives import current_mesh, shard_offset, sharded_axes
from zoo.parallel.fields import observed

from ..abstract import AbstractLinear
from ..linear import Linear, add_expert_biases, reduce_output
from ..token_info import TokenInfo


class AmaxHistory(Module):
    """Maxima of a layer's inputs, weight and gradients in the steps before, the latest first, for delayed scaling."""

    input: Float[Array, "history"] = observed()
    weight: Float[Array, "history"] = observed()
    gradient: Float[Array, "history"] = observed()

    def __init__(self, length: int):
        """Begin with zeros, which scale by 1."""
        self.input, self.weight, self.gradient = (jnp.zeros(length, jnp.float32) for _ in range(3))


class FP8Linear(AbstractLinear):
    """y = W x + b, with the products of the forward and backward pass in FP8 or FP4, by a recipe.

    The parameters have the names and shapes of a `Linear`: they are master weights, which the optimizer updates and
    checkpoints hold. A product quantizes its operands, sums in float32 and rounds once.

    Scales belong to global tensors on any mesh: a maximum is taken over the devices that shard a tensor.
    """

    weight: Float[Array, "out in"]
    bias: Float[Array, "out"] | None
    amax: AmaxHistory | None
    keys: Key[Array, "batch"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    recipe: AbstractRecipe = eqx.field(static=True)
    stacked_dims: tuple[str, ...] = eqx.field(static=True)
    """Dims along which layers are stacked with this one, "layers" or "experts". Mesh axes that shard these hold other
    layers, so this layer's maximum is not taken over them."""

    def __init__(self, linear: Linear, recipe: AbstractRecipe, *, stacked_dims: Sequence[str] = ()):
        """Take over the parameters of a linear layer."""
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_ = linear.in_
        self.out = linear.out
        if recipe.history_length:
            self.amax = AmaxHistory(recipe.history_length)
        else:
            self.amax = None
        self.keys = None
        self.recipe = recipe
        self.stacked_dims = tuple(stacked_dims)

    @property
    def out_size(self) -> int:
        return self.weight.shape[-2]

    @property
    def dense_weight(self) -> Float[Array, "out in"]:
        return self.weight.astype(jnp.float32)

    @property
    def dense_bias(self) -> Float[Array, "out"] | None:
        return self.bias

    def with_weight(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None) -> "FP8Linear":
        return eqx.tree_at(lambda x: (x.weight, x.bias), self, (weight, bias), is_leaf=lambda x: x is None)

    def with_dropout_keys(self, info: TokenInfo, site: int) -> "FP8Linear":
        """Return a copy that holds the PRNG keys of its stochastic rounding."""
        if not self.recipe.rounds_stochastically:
            return self
        return eqx.tree_at(lambda x: x.keys, self, info.fold_keys(site).keys, is_leaf=lambda x: x is None)

    def to_linear(self) -> Linear:
        """Return a `Linear` with the same parameters, stacked as these are."""
        shape = self.weight.shape[-2:]
        options = {"in_": self.in_, "out": self.out, "key": jax.random.key(0)}
        linear = eqx.filter_eval_shape(Linear, *shape[::-1], bias=True, **options)
        return eqx.tree_at(lambda x: (x.weight, x.bias), linear, (self.weight, self.bias))

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        y = reduce_output(self._contract(x, 1), self.in_, self.out)
        if self.bias is not None:
            y = y + self.bias
        return y

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return reduce(self._contract(x, 0), over=self.out.name)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        y = scaled_grouped_matmul(x, self.weight, sizes, self.recipe, axes=self._find_axes(x))
        return add_expert_biases(y, self.bias, sizes, self.in_)

    def _contract(self, x: Float[Array, "*rows k"], dim: int) -> Float[Array, "*rows n"]:
        """Contract the last dim of `x` with dim 0 or 1 of the weight."""
        tokens = x.shape[-2] if x.ndim > 2 else 1
        self._check_blocks(x, tokens)
        rows = x.reshape(-1, tokens, x.shape[-1])
        if self.amax is None:
            history = None
        else:
            history = AmaxArrays(self.amax.input, self.amax.weight, self.amax.gradient)
        options = {"axes": self._find_axes(x), "history": history, "noise": self._find_noise(x, dim)}
        y = scaled_matmul(rows, self.weight, dim, self.recipe, **options)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _check_blocks(self, x: Float[Array, "..."], tokens: int) -> None:
        """**Raises** `ValueError` if a shard of a dim is not a whole number of blocks. A dim that is not sharded may
        end with a smaller block."""
        size = self.recipe.block_size
        out, in_ = self.weight.shape
        dims = ((self.in_.name, self.weight, in_), (self.out.name, self.weight, out), ("seq", x, tokens))
        for name, array, length in dims:
            if length % size and (count := num_shards(array, name)) > 1:
                above = -(-length // size) * size * count
                nearest = f"{above}"
                if below := length // size * size * count:
                    nearest = f"{below} or {above}"
                raise ValueError(
                    f"{type(self.recipe).__name__} has blocks of {size} along {name}, and a device has {length} of "
                    f"{length * count}: use {nearest} {name}, fewer devices along "
                    f"{' x '.join(sharded_axes(array, name))}, or CurrentScaling"
                )

    def _find_axes(self, x: Float[Array, "..."]) -> MeasuredAxes:
        """Return the mesh axes that shard the input, the weight and the gradient of the output."""
        mesh = current_mesh()
        if mesh is None:
            return MeasuredAxes()
        others = {axis for dim in self.stacked_dims for axis in mesh.axes(dim)}
        order = lambda axes: tuple(axis for axis in mesh.devices.axis_names if axis in axes - others)
        weight = varying(self.weight).intersection(mesh.axes(self.in_.name) + mesh.axes(self.out.name))
        return MeasuredAxes(order(varying(x)), order(weight), order(varying(x) | weight))

    def _find_noise(self, x: Float[Array, "*rows k"], dim: int) -> NoiseKeys | None:
        """Return the keys of stochastic rounding and the offsets of this device's shard of the output."""
        if self.keys is None:
            return None
        size = self.weight.shape[1 - dim]
        free = self.out if dim == 1 else self.in_
        offsets = shard_offset(x, "seq", x.shape[-2]), shard_offset(self.weight, free.name, size)
        return NoiseKeys(jax.random.key_data(self.keys), *offsets)
