"""Quantized number formats and their matrix products: int8, NF4 and MXFP4 for frozen weights; FP8 for training."""

from . import blocks as blocks
from . import fp8 as fp8
from . import groups as groups
from . import int8 as int8
from . import mxfp4 as mxfp4
from . import mxfp8 as mxfp8
from . import nf4 as nf4
from . import packed_matmul as packed_matmul
from . import per_tensor as per_tensor
from . import recipe as recipe
from . import scaled_grouped_matmul as scaled_grouped_matmul
from . import scaled_matmul as scaled_matmul
