"""The projection after OPT-350m's last layer."""

from jaxtyping import Array, Float, Key

from zoo.layers import AbstractLinear, AbstractNorm, Linear
from zoo.parallel import Dim


class ProjectedNorm(AbstractNorm):
    """W norm(x): the final norm, and a projection to the features of a smaller embedding (OPT-350m; Zhang et al.,
    arXiv:2205.01068)."""

    norm: AbstractNorm
    linear: AbstractLinear

    def __init__(self, norm: AbstractNorm, embed: int, size: int, *, key: Key[Array, ""]):
        """`size`: features of the result."""
        self.norm = norm
        self.linear = Linear(embed, size, in_=Dim("embed"), out=Dim("latent"), key=key)

    def __call__(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows latent"]:
        return self.linear(self.norm(x))
