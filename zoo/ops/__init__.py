"""Pure functions of arrays: attention, recurrences, expert dispatch, quantized formats. No parameters, no mesh."""

from . import activations as activations
from . import attention as attention
from . import convolution as convolution
from . import cross_entropy as cross_entropy
from . import dropout as dropout
from . import implementations as implementations
from . import matmul as matmul
from . import moe as moe
from . import ngram as ngram
from . import normalization as normalization
from . import platform as platform
from . import quantized as quantized
from . import recurrence as recurrence
from . import rotary as rotary
from . import sampling as sampling
from . import varying as varying
