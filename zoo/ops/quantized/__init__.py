"""Quantized number formats (int8, NF4, MXFP4), and matrix products that dequantize tile by tile."""

from . import int8 as int8
from . import mxfp4 as mxfp4
from . import nf4 as nf4
from . import packed_matmul as packed_matmul
