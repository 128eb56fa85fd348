"""Embedding of images: patches, class and register tokens, learned positions."""

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.ops.axial_rotary import patch_coordinates
from zoo.ops.resize import linear_weights, resize_bicubic
from zoo.parallel import Dim, Module, no_weight_decay

from ..abstract import AbstractLinear
from ..linear import Linear, contract, truncated_normal

Images = Float[Array, "batch channels height width"]


class PatchEmbedding(Module):
    """Patch embedding of a vision Transformer: W flatten(patch) + b for each patch of an image, row by row (Dosovitskiy
    et al., arXiv:2010.11929, equation 1).

    PyTorch's `Conv2d` with a stride equal to its kernel, as one matrix product. Pixels beyond the last whole patch, at
    the right and at the bottom, are left out, as they are there.
    """

    weight: Float[Array, "embed channels patch_height patch_width"]
    bias: Float[Array, "embed"] | None

    def __init__(
        self, channels: int, embed: int, patch_size: tuple[int, int], *, bias: bool = True, key: Key[Array, ""]
    ):
        """Initialize the weight from a normal distribution truncated at two standard deviations, with standard
        deviation 1 / sqrt(pixels of a patch), and the bias with zeros. `patch_size`: height and width."""
        height, width = patch_size
        self.weight = truncated_normal(key, (embed, channels, height, width), (channels * height * width) ** -0.5)
        self.bias = jnp.zeros(embed, jnp.float32) if bias else None

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return self.weight.shape[2], self.weight.shape[3]

    def count_patches(self, images: Images) -> tuple[int, int]:
        """Return the number of rows and of columns of patches. **Raises** `ValueError` for images of another number of
        channels, or smaller than a patch."""
        _, channels, *size = images.shape
        _, expected, *patch = self.weight.shape
        if channels != expected:
            if images.shape[-1] == expected:
                hint = ": channels come before height and width"
            else:
                hint = ""
            raise ValueError(f"expected images of {expected} channels, got shape {images.shape}{hint}")
        if size[0] < patch[0] or size[1] < patch[1]:
            raise ValueError(
                f"an image of {size[0]} x {size[1]} pixels is smaller than a patch of {patch[0]} x {patch[1]}"
            )
        return size[0] // patch[0], size[1] // patch[1]

    def __call__(self, images: Images) -> Float[Array, "batch patches embed"]:
        """Embed patches, in the dtype of the weight. **Raises** `ValueError` as `count_patches` does."""
        rows, columns = self.count_patches(images)
        height, width = self.patch_size
        images = images[:, :, : rows * height, : columns * width].astype(self.weight.dtype)
        pixels = rearrange(images, "b c (y h) (x w) -> b (y x) (c h w)", h=height, w=width)
        x = contract(pixels, self.weight.reshape(self.weight.shape[0], -1), 1)
        if self.bias is not None:
            x = x + self.bias
        return x


class PatchPositions(Module):
    """Learned positions of a grid of patches, after the positions of any other tokens (Dosovitskiy et al.,
    arXiv:2010.11929, section 3.1). For an image of another size they are interpolated (section 3.2)."""

    weight: Float[Array, "positions embed"]

    grid: tuple[int, int] = eqx.field(static=True)
    """Rows and columns of patches that positions were learned for."""

    def __init__(
        self, grid: tuple[int, int], embed: int, *, num_other: int = 0, scale: float = 0.02, key: Key[Array, ""]
    ):
        """- `num_other`: tokens before the patches that have a position, such as a class token.
        - `scale`: standard deviation of the initial weights."""
        self.weight = truncated_normal(key, (num_other + grid[0] * grid[1], embed), scale)
        self.grid = grid

    def __call__(self, grid: tuple[int, int]) -> Float[Array, "tokens embed"]:
        """Return the positions of an image with a `grid` of patches: bicubically interpolated if it is another one."""
        if grid == self.grid:
            return self.weight
        num_other = self.weight.shape[0] - self.grid[0] * self.grid[1]
        learned = self.weight[num_other:].reshape(*self.grid, -1)
        patches = resize_bicubic(learned, grid).reshape(-1, self.weight.shape[-1])
        return jnp.concatenate([self.weight[:num_other], patches])


class ImageEmbedding(Module):
    """Tokens of an image: [class token, registers, patches] + positions (Dosovitskiy et al., arXiv:2010.11929, equation
    1; registers: Darcet et al., arXiv:2309.16588). Each part but the patches is optional.

    The learned vector of `mask_token` stands in for patches that are masked, in masked image modeling.
    """

    patches: PatchEmbedding
    class_token: Float[Array, "embed"] | None
    register_tokens: Float[Array, "registers embed"] | None = no_weight_decay()
    mask_token: Float[Array, "embed"] | None
    positions: PatchPositions | None

    reads = None  # an array of pixels

    def __init__(
        self,
        channels: int,
        embed: int,
        *,
        patch_size: tuple[int, int],
        grid: tuple[int, int] | None = None,
        class_token: bool = True,
        registers: int | None = None,
        mask_token: bool = False,
        bias: bool = True,
        scale: float = 0.02,
        key: Key[Array, ""],
    ):
        """- `grid`: rows and columns of patches to learn positions for; None for no positions.
        - `registers`: number of register tokens, which may be 0; None for no array of them.
        - `scale`: standard deviation of the initial tokens and positions. The mask token is initialized to 0.

        **Raises** `ValueError` for registers with learned positions, which they would have too.
        """
        if registers is not None and grid is not None:
            raise ValueError("registers have no learned positions: leave out registers, or grid")
        patch_key, class_key, register_key, position_key = jax.random.split(key, 4)
        self.patches = PatchEmbedding(channels, embed, patch_size, bias=bias, key=patch_key)
        if class_token:
            self.class_token = truncated_normal(class_key, (embed,), scale)
        else:
            self.class_token = None
        if registers is None:
            self.register_tokens = None
        else:
            self.register_tokens = truncated_normal(register_key, (registers, embed), scale)
        self.mask_token = jnp.zeros(embed, jnp.float32) if mask_token else None
        num_other = int(class_token)
        if grid is None:
            self.positions = None
        else:
            self.positions = PatchPositions(grid, embed, num_other=num_other, scale=scale, key=position_key)

    @property
    def num_other(self) -> int:
        """Number of tokens before the patches."""
        registers = 0 if self.register_tokens is None else self.register_tokens.shape[0]
        return (self.class_token is not None) + registers

    def __call__(
        self, images: Images, masked: Bool[Array, "batch patches"] | None = None
    ) -> Float[Array, "batch seq embed"]:
        """Return the tokens of images. **Raises** `ValueError` for `masked` without a mask token, and for images as
        `PatchEmbedding.count_patches` does."""
        x = self.patches(images)
        if masked is not None:
            if self.mask_token is None:
                raise ValueError("masked patches need a mask token, which this model does not have")
            x = jnp.where(masked[..., None], self.mask_token, x)
        first = []
        if self.class_token is not None:
            first.append(self.class_token[None])
        if self.register_tokens is not None:
            first.append(self.register_tokens)
        first = [jnp.broadcast_to(tokens, (x.shape[0], *tokens.shape)).astype(x.dtype) for tokens in first]
        x = jnp.concatenate([*first, x], axis=1)
        if self.positions is None:
            return x
        return x + self.positions(self.patches.count_patches(images))

    def compute_coordinates(self, images: Images) -> Float[Array, "batch seq 2"]:
        """Return row and column of each token, for `zoo.ops.axial_rotary`: of the patches' centers, and (0, 0) for
        other tokens, which are not turned."""
        patches = patch_coordinates(*self.patches.count_patches(images))
        coordinates = jnp.pad(jnp.asarray(patches), [(self.num_other, 0), (0, 0)])
        return jnp.broadcast_to(coordinates, (images.shape[0], *coordinates.shape))


class PatchedImages(Module):
    """Images of several shapes, each a row of flattened patches with padding at its end (NaFlex: SigLIP 2, Tschannen et
    al., arXiv:2502.14786, section 2.4.2)."""

    pixels: Float[Array, "batch patches pixels"]
    """Patches row by row, each flattened as (row, column, channel)."""
    mask: Bool[Array, "batch patches"]
    """True for patches, False for padding."""
    grids: Int[Array, "batch 2"]
    """Rows and columns of patches of each image."""


class PatchedImageEmbedding(Module):
    """Tokens of `PatchedImages`: W patch + b + positions. The positions of a learned grid are interpolated linearly to
    the grid of each image, with antialiasing."""

    patches: AbstractLinear
    positions: PatchPositions

    reads = PatchedImages

    def __init__(
        self, channels: int, embed: int, *, patch_size: tuple[int, int], grid: tuple[int, int], key: Key[Array, ""]
    ):
        """`grid`: rows and columns of patches to learn positions for."""
        patch_key, position_key = jax.random.split(key)
        pixels = channels * patch_size[0] * patch_size[1]
        self.patches = Linear(pixels, embed, out=Dim("embed"), bias=True, key=patch_key)
        self.positions = PatchPositions(grid, embed, key=position_key)

    def __call__(self, images: PatchedImages, masked: None = None) -> Float[Array, "batch patches embed"]:
        """Embed patches, in the dtype of the positions. **Raises** `ValueError` for `masked` patches, which need a mask
        token."""
        if masked is not None:
            raise ValueError("masked patches need a mask token, which this model does not have")
        learned = self.positions.weight.reshape(*self.positions.grid, -1)
        rows, columns = jnp.maximum(images.grids, 1).T
        index = jnp.arange(images.pixels.shape[1])
        row = jnp.minimum(index // columns[:, None], rows[:, None] - 1)  # padding, too, has a finite position
        by_row = linear_weights(learned.shape[0], rows, row)
        by_column = linear_weights(learned.shape[1], columns, index % columns[:, None])
        positions = jnp.einsum("bph,bpw,hwe->bpe", by_row, by_column, learned.astype(jnp.float32), precision="highest")
        return self.patches(images.pixels.astype(learned.dtype)) + positions.astype(learned.dtype)

    def compute_coordinates(self, images: PatchedImages) -> None:
        """Return None: positions are learned."""
