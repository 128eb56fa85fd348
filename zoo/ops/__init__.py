"""The mathematics: pure functions of arrays. No parameters, no mesh."""

from zoo.ops import activations as activations
from zoo.ops import attention as attention
from zoo.ops import cross_entropy as cross_entropy
from zoo.ops import dropout as dropout
from zoo.ops import normalisation as normalisation
from zoo.ops import product as product
from zoo.ops import rotary as rotary
