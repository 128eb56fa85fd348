"""Linear recurrences: reference scans, chunked matrix-product algorithms, and one file per paper."""

from . import chunks as chunks
from . import decoupled_delta as decoupled_delta
from . import delta_rule as delta_rule
from . import diagonal_scan as diagonal_scan
from . import gated_linear as gated_linear
from . import generalized_delta as generalized_delta
from . import hgrn as hgrn
from . import linear_attention as linear_attention
from . import mamba as mamba
from . import mamba2 as mamba2
from . import mamba3 as mamba3
from . import mesa_net as mesa_net
from . import mlstm as mlstm
from . import rg_lru as rg_lru
from . import rwkv4 as rwkv4
from . import rwkv6 as rwkv6
from . import rwkv7 as rwkv7
from . import stabilizer as stabilizer
from . import triangular as triangular
