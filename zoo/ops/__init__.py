"""The mathematics: pure functions of arrays. No parameters, no mesh."""

from zoo.ops import activations as activations
from zoo.ops import attention as attention
from zoo.ops import cross_entropy as cross_entropy
from zoo.ops import dispatch as dispatch
from zoo.ops import dropout as dropout
from zoo.ops import grouped_matmul as grouped_matmul
from zoo.ops import mxfp4 as mxfp4
from zoo.ops import normalisation as normalisation
from zoo.ops import packed_matmul as packed_matmul
from zoo.ops import product as product
from zoo.ops import rotary as rotary
from zoo.ops import routing as routing
