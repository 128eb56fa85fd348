"""OFT: trainable block-diagonal rotations of the inputs of a frozen linear layer."""

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear
from zoo.models.targets import Targets, find_linears, get_linear_shape
from zoo.ops.matmul import einsum_fp32_accum
from zoo.ops.moe.grouped_matmul import grouped_matmul
from zoo.parallel import Dim
from zoo.parallel.fields import adapter_parameter

from ..apply import apply_uniform
from ..base import AbstractUniformAdapter, Matrix
from ..peft_limits import resolve_targets

_Model = TypeVar("Model")
_Blocks = Float[Array, "blocks size size"]


class OFT(AbstractUniformAdapter):
    """y = W Rᵀ x + b, with R orthogonal and block-diagonal, which preserves the angles between rows of W (Qiu et al.,
    arXiv:2306.07280, section 3.2). The inputs are rotated, not the weight (OFTv2, arXiv:2506.19847, section 3). A block
    is the Cayley transform of a skew-symmetric matrix Q, whose entries above the diagonal are trainable and initialized
    with zeros:

        R = (I - Q) (I + Q)⁻¹                                neumann_terms = None: exactly orthogonal
        R = I + 2 Q + 2 Q² + ... + Q^(neumann_terms - 1)     nearly (I + Q) (I - Q)⁻¹, by a truncated Neumann series

    The two rotate in opposite directions, as in PEFT. The strength scales Q.

    FLOPs: 2 block_size in per token, in addition to the base's 2 in out, and a few block_size² in per call.
    """

    blocks: Float[Array, "in_blocks pairs"] | None = adapter_parameter(full_precision=True, no_weight_decay=True)
    """Entries above the diagonal of each block, in row-major order."""
    shared: Float[Array, "pairs"] | None = adapter_parameter(full_precision=True)
    """Entries of a single block that is used for all, instead of `blocks`."""

    in_blocks: Dim = eqx.field(static=True)
    block_size: int = eqx.field(static=True)
    neumann_terms: int | None = eqx.field(static=True)

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
        """- `block_size`, or the number of `blocks`.
        - `shared`: all blocks are one.
        - `neumann_terms` of the series, or None for the exact inverse.

        **Raises** `ValueError` unless exactly one of the first two is given, if the block size does not divide the
        number of inputs, and for blocks of one input, which have no rotation.
        """
        super().__init__(base, applies=applies, adapter_name=adapter_name)
        _, in_size = get_linear_shape(base)
        self.block_size = size = _resolve_block_size(in_size, block_size, blocks)
        pairs = size * (size - 1) // 2
        if shared:
            self.blocks = None
        else:
            self.blocks = jnp.zeros((in_size // size, pairs), jnp.float32)
        self.shared = jnp.zeros(pairs, jnp.float32) if shared else None
        divides_unit = self.in_.unit % size == 0
        self.in_blocks = Dim(self.in_.name, self.in_.unit // size if divides_unit else 1)
        self.neumann_terms = neumann_terms

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        """Return W Rᵀ x + b."""
        return self.base(self._rotate(x, self._compute_rotations()))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self._rotate(self.base.transposed(x), self._compute_rotations().swapaxes(-1, -2))

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        rotations = eqx.filter_vmap(OFT._compute_rotations)(self).swapaxes(-1, -2)
        blocks = self._split_blocks(x)
        num_blocks = blocks.shape[1]
        rotations = jnp.broadcast_to(rotations, (len(sizes), num_blocks, *rotations.shape[-2:]))
        padding = jnp.zeros_like(rotations[:1])  # for rows without an expert: each block is a run of all rows
        groups = jnp.concatenate([rotations, padding]).swapaxes(0, 1).reshape(-1, *rotations.shape[-2:])
        group_sizes = jnp.tile(jnp.append(sizes, len(x) - sizes.sum()), num_blocks)
        rows = blocks.swapaxes(0, 1).reshape(-1, self.block_size)
        rotated = grouped_matmul(rows, groups.astype(x.dtype), group_sizes)
        return self.base.grouped(rotated.reshape(num_blocks, len(x), -1).swapaxes(0, 1).reshape(x.shape), sizes)

    def _compute_rotations(self) -> _Blocks:
        """Return the blocks of R, or the one shared block, in float32."""
        pairs = self.shared[None] if self.shared is not None else self.blocks
        assert pairs is not None
        if self.strength.ndim != self.applies.ndim:
            raise NotImplementedError(
                f"the adapter {self.adapter_name!r} is an OFT, which turns all rows alike: no select_per_row"
            )
        scaled = jnp.where(self.applies, self.strength, 0) * pairs.astype(jnp.float32)
        return cayley_transform(skew_symmetric(scaled, self.block_size), self.neumann_terms)

    def _rotate(self, x: Float[Array, "*rows in"], rotations: _Blocks) -> Float[Array, "*rows in"]:
        """Return x R for each row."""
        blocks = self._split_blocks(x)
        if len(rotations) == 1:
            rows = blocks.reshape(-1, self.block_size)
            return einsum_fp32_accum("ri,io->ro", rows, rotations[0].astype(x.dtype)).reshape(x.shape)
        return einsum_fp32_accum("rbi,bio->rbo", blocks, rotations.astype(x.dtype)).reshape(x.shape)

    def _split_blocks(self, x: Float[Array, "*rows in"]) -> Float[Array, "row blocks size"]:
        """Split each row into blocks. **Raises** `ValueError` if a shard boundary cuts one."""
        if x.shape[-1] % self.block_size:
            raise ValueError(
                f"a device's {x.shape[-1]} inputs of {self.in_.name} are not whole blocks of {self.block_size}: take "
                "smaller blocks, or a smaller mesh axis"
            )
        return x.reshape(-1, x.shape[-1] // self.block_size, self.block_size)

    def merge_weight(self, weight: Matrix) -> Matrix:
        blocks = self._split_blocks(weight)
        rotations = self._compute_rotations()
        rotations = jnp.broadcast_to(rotations, (blocks.shape[1], *rotations.shape[1:]))
        return jnp.einsum("rbi,boi->rbo", blocks, rotations, precision="highest").reshape(weight.shape)


def _resolve_block_size(in_size: int, block_size: int | None, blocks: int | None) -> int:
    if (block_size is None) == (blocks is None):
        raise ValueError("an OFT needs the size of its blocks or their number: block_size or blocks")
    size = block_size if blocks is None else in_size // max(blocks, 1)
    if size is None or size < 2 or in_size % size or (blocks is not None and size * blocks != in_size):
        requested = f"blocks of {block_size}" if blocks is None else f"{blocks} blocks"
        fitting = ", ".join(str(n) for n in range(2, min(in_size, 4096) + 1) if in_size % n == 0)
        raise ValueError(
            f"{in_size} inputs do not divide into {requested} of two inputs or more; sizes that fit are {fitting}"
        )
    return size


def skew_symmetric(pairs: Float[Array, "blocks pairs"], size: int) -> _Blocks:
    """Return skew-symmetric matrices from their entries above the diagonal, in row-major order."""
    rows, columns = np.triu_indices(size, 1)
    index = np.zeros((size, size), np.int32)
    sign = np.zeros((size, size), np.float32)
    index[rows, columns] = index[columns, rows] = np.arange(len(rows))
    sign[rows, columns], sign[columns, rows] = 1, -1
    return pairs[:, index] * sign


def cayley_transform(skewed: _Blocks, neumann_terms: int | None) -> _Blocks:
    """Return the Cayley transform of each block: exact, or the first terms of its Neumann series, the last of them not
    doubled. 3 terms are computed as 4, as in PEFT."""
    identity = jnp.eye(skewed.shape[-1], dtype=jnp.float32)
    if neumann_terms is None:
        return jnp.linalg.solve(identity + skewed, identity - skewed)
    if neumann_terms < 2:
        return jnp.broadcast_to(identity, skewed.shape)
    total = identity + 2 * skewed
    power = skewed
    last = max(neumann_terms, 4) - 1 if neumann_terms > 2 else 1
    for exponent in range(2, last + 1):
        power = jnp.matmul(power, skewed, precision="highest")
        total = total + (1 if exponent == last else 2) * power
    return total


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
    """Wrap each target module with an `OFT` and freeze the rest of the model. The inputs are split into blocks of
    `block_size`, 32 by default, or into `blocks` blocks; `shared` and `neumann_terms` are as in `OFT`. **Raises**
    `ValueError` for a target that matches nothing, and for a block size that does not divide the inputs."""
    size = 32 if block_size is None and blocks is None else block_size

    def factory(base: AbstractLinear, *, key: Key[Array, ""], **applies: Array) -> OFT:
        return OFT(
            base,
            block_size=size,
            blocks=blocks,
            shared=shared,
            neumann_terms=neumann_terms,
            adapter_name=adapter_name,
            **applies,
        )

    targets = resolve_targets(model, targets, find_linears(model, include_embeddings=True), "OFT")
    return apply_uniform(model, factory, targets, jax.random.key(0) if key is None else key, adapter_name)
