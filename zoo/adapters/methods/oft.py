"""OFT: the inputs of a matrix turned, block by block, by rotations that are learnt."""

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import AbstractLinear
from zoo.ops.matmul import einsum_fp32_accum
from zoo.ops.moe.grouped_matmul import grouped_matmul
from zoo.parallel import Dim, adapter_parameter, buffer, wrapped

from ..apply import apply_uniform
from ..base import AbstractAdapter, Matrix, Strength, full_strength, get_dims, get_linear_shape
from ..targets import Targets

_Model = TypeVar("Model")
_Blocks = Float[Array, "blocks size size"]


class OFT(AbstractAdapter):
    """y = W Rᵀ x + b, with R orthogonal and block-diagonal, so that angles between rows of W stay as they are (Qiu et
    al., arXiv:2306.07280, section 3.2); it is x that is turned, and not W (OFTv2, arXiv:2506.19847, section 3). A block
    is the Cayley transform of a matrix Q with Qᵀ = -Q, of which the numbers above the diagonal are learnt, from zeros:

        R = (I - Q) (I + Q)⁻¹                       terms = None: exactly orthogonal
        R = I + 2 Q + 2 Q² + ... + Q^(terms - 1)    nearly (I + Q) (I - Q)⁻¹, by the first terms of its series

    These turn opposite ways, as PEFT has it. Counting in part, an adapter turns by a part of Q.

    FLOPs: 2 block_size in a token beside the base's 2 in out, and a few block_size² in a call.
    """

    base: AbstractLinear = wrapped()
    blocks: Float[Array, "in_blocks pairs"] | None = adapter_parameter(full_precision=True)
    """Of each block the numbers above the diagonal, row after row."""
    shared: Float[Array, "pairs"] | None = adapter_parameter(full_precision=True)
    """In their place, where all blocks are one."""
    applies: Bool[Array, ""]
    """False in a layer that has no adapter, where it is stacked with others that have."""
    strength: Strength = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    in_blocks: Dim = eqx.field(static=True)
    block_size: int = eqx.field(static=True)
    neumann_terms: int | None = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)

    def __init__(
        self,
        base: AbstractLinear,
        *,
        block_size: int | None = None,
        blocks: int | None = None,
        shared: bool = False,
        neumann_terms: int | None = 5,
        applies: bool | Array = True,
        adapter_name: str = "oft",
    ):
        """- `block_size`, or how many `blocks` there are.
        - `shared`: whether all blocks are one.
        - `terms` of the series, or None for the inverse itself.

        **Raises** `ValueError` where both or none of the first two is given, where inputs are no whole blocks, and for
        blocks of one input, which nothing turns.
        """
        (self.in_, self.out), (_, in_size) = get_dims(base), get_linear_shape(base)
        self.block_size = size = _resolve_block_size(in_size, block_size, blocks)
        pairs = size * (size - 1) // 2
        self.base, self.applies, self.strength, self.adapter_name = (
            base,
            jnp.asarray(applies),
            full_strength(),
            adapter_name,
        )
        self.blocks = None if shared else jnp.zeros((in_size // size, pairs))
        self.shared = jnp.zeros(pairs) if shared else None
        whole = self.in_.unit % size == 0
        self.in_blocks = Dim(self.in_.name, self.in_.unit // size if whole else 1)
        self.neumann_terms = neumann_terms

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return self.base(self.rotate(x, self.compute_rotations()))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self.rotate(self.base.transposed(x), self.compute_rotations().swapaxes(-1, -2))

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        rotations = eqx.filter_vmap(OFT.compute_rotations)(self).swapaxes(-1, -2)
        cut = self.split_blocks(x)
        count = cut.shape[1]
        rotations = jnp.broadcast_to(rotations, (len(sizes), count, *rotations.shape[-2:]))
        idle = jnp.zeros_like(rotations[:1])  # of rows that no expert has: each block is a run of all rows
        groups = jnp.concatenate([rotations, idle]).swapaxes(0, 1).reshape(-1, *rotations.shape[-2:])
        runs = jnp.tile(jnp.append(sizes, len(x) - sizes.sum()), count)
        turned = grouped_matmul(cut.swapaxes(0, 1).reshape(-1, self.block_size), groups.astype(x.dtype), runs)
        return self.base.grouped(turned.reshape(count, len(x), -1).swapaxes(0, 1).reshape(x.shape), sizes)

    def compute_rotations(self) -> _Blocks:
        """R, block by block, or its one block: float32."""
        pairs = self.shared[None] if self.shared is not None else self.blocks
        assert pairs is not None
        if self.strength.ndim != self.applies.ndim:
            raise NotImplementedError(
                f"the adapter {self.adapter_name!r} is an OFT, which turns all rows alike: no by_row"
            )
        counted = jnp.where(self.applies, self.strength, 0) * pairs.astype(jnp.float32)
        return cayley_transform(skew_symmetric(counted, self.block_size), self.neumann_terms)

    def rotate(self, x: Float[Array, "*rows in"], rotations: _Blocks) -> Float[Array, "*rows in"]:
        """x R of each row."""
        cut = self.split_blocks(x)
        if len(rotations) == 1:
            return einsum_fp32_accum(
                "ri,io->ro", cut.reshape(-1, self.block_size), rotations[0].astype(x.dtype)
            ).reshape(x.shape)
        return einsum_fp32_accum("rbi,bio->rbo", cut, rotations.astype(x.dtype)).reshape(x.shape)

    def split_blocks(self, x: Float[Array, "*rows in"]) -> Float[Array, "row blocks size"]:
        """Each row in its blocks. **Raises** `ValueError` where a mesh cuts one."""
        if x.shape[-1] % self.block_size:
            raise ValueError(
                f"a device's {x.shape[-1]} inputs of {self.in_.name} are no whole blocks of {self.block_size}: take "
                "smaller blocks, or a smaller mesh axis"
            )
        return x.reshape(-1, x.shape[-1] // self.block_size, self.block_size)

    def merge_weight(self, weight: Matrix) -> Matrix:
        cut, rotations = self.split_blocks(weight), self.compute_rotations()
        every = jnp.broadcast_to(rotations, (cut.shape[1], *rotations.shape[1:]))
        return jnp.einsum("rbi,boi->rbo", cut, every, precision="highest").reshape(weight.shape)


def _resolve_block_size(in_size: int, block_size: int | None, blocks: int | None) -> int:
    if (block_size is None) == (blocks is None):
        raise ValueError("an OFT is told how large its blocks are, or how many: block_size or blocks")
    size = block_size if blocks is None else in_size // max(blocks, 1)
    if size is None or size < 2 or in_size % size or (blocks is not None and size * blocks != in_size):
        asked = f"blocks of {block_size}" if blocks is None else f"{blocks} blocks"
        fitting = ", ".join(str(n) for n in range(2, min(in_size, 4096) + 1) if in_size % n == 0)
        raise ValueError(f"{in_size} inputs are no {asked} of two inputs or more; sizes that fit are {fitting}")
    return size


def skew_symmetric(pairs: Float[Array, "blocks pairs"], size: int) -> _Blocks:
    """Matrices with Qᵀ = -Q, of the numbers above their diagonals, row after row."""
    rows, columns = np.triu_indices(size, 1)
    index, sign = np.zeros((size, size), np.int32), np.zeros((size, size), np.float32)
    index[rows, columns] = index[columns, rows] = np.arange(len(rows))
    sign[rows, columns], sign[columns, rows] = 1, -1
    return pairs[:, index] * sign


def cayley_transform(skewed: _Blocks, neumann_terms: int | None) -> _Blocks:
    """The Cayley transform of each block, or, with `terms`, the first ones of its series with the last counted once:
    of 3 one more is taken, as PEFT takes them."""
    identity = jnp.eye(skewed.shape[-1])
    if neumann_terms is None:
        return jnp.linalg.solve(identity + skewed, identity - skewed)
    if neumann_terms < 2:
        return jnp.broadcast_to(identity, skewed.shape)
    found, power = identity + 2 * skewed, skewed
    last = max(neumann_terms, 4) - 1 if neumann_terms > 2 else 1
    for exponent in range(2, last + 1):
        power = jnp.matmul(power, skewed, precision="highest")
        found = found + (1 if exponent == last else 2) * power
    return found


def oft(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    block_size: int | None = None,
    blocks: int | None = None,
    shared: bool = False,
    neumann_terms: int | None = 5,
    adapter_name: str = "oft",
    key: Key[Array, ""] | None = None,
) -> _Model:
    """The model with an `OFT` around each of the targets, in blocks of `block_size` inputs, 32 unless given, or in so
    many `blocks` a matrix; `shared` and `terms` are `OFT`'s. **Raises** `ValueError` for a target that means no matrix,
    and where inputs are no whole blocks."""
    size = 32 if block_size is None and blocks is None else block_size

    def make(base: AbstractLinear, *, key: Key[Array, ""], **applies: Array) -> OFT:
        return OFT(
            base,
            block_size=size,
            blocks=blocks,
            shared=shared,
            neumann_terms=neumann_terms,
            adapter_name=adapter_name,
            **applies,
        )

    return apply_uniform(model, make, targets, jax.random.key(0) if key is None else key, adapter_name)
