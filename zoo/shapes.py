"""Aliases of array shapes that several modules annotate.

    batch       rows of a batch; on a mesh, those of this device
    seq         tokens of a row
    tokens      tokens of a row between sublayers: all, or those of this device with `zoo.parallel.SEQUENCE`
    embed       features of the residual stream
    heads       query heads; fewer key and value heads are `kv_heads`
    key_dim     features of a key, and rows of a recurrent state
    value_dim   features of a value, and columns of a recurrent state

The annotation of a parameter is also its sharding (`zoo.parallel.module`), so parameters spell out their dims where
they are declared. The aliases are for activations, recurrent states and token metadata.
"""

from jaxtyping import Array, Bool, Float, Int

Tokens = Int[Array, "batch seq"]
SegmentIds = Int[Array, "batch seq"]
Positions = Int[Array, "batch seq"]
PaddingMask = Bool[Array, "batch seq"]

HiddenStates = Float[Array, "batch seq embed"]
ResidualStream = Float[Array, "batch tokens embed"]
HeadVectors = Float[Array, "batch seq heads _"]
KVHeads = Float[Array, "batch seq kv_heads head_dim"]
ValueHeads = Float[Array, "batch seq kv_heads value_dim"]

Queries = Float[Array, "batch seq heads key_dim"]
Values = Float[Array, "batch seq heads value_dim"]
LogDecays = Float[Array, "batch seq heads"] | Float[Array, "batch seq heads key_dim"]
MatrixState = Float[Array, "batch heads key_dim value_dim"]
