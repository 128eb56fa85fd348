"""Low-precision recipes as plain numpy in float64: the operands of a linear layer's three products, dequantized.

Each function takes one matrix whose contracted dim is the last, and returns it as the recipe rounds it.
"""

import ml_dtypes
import numpy as np

E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn


def round_to(x, dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(np.float32(x), -largest, largest).astype(dtype).astype(np.float64)


def per_tensor(x, dtype, amax=None):
    amax = np.abs(x).max() if amax is None else amax
    multiplier = np.float32(float(ml_dtypes.finfo(dtype).max)) / np.float32(amax) if amax > 0 else np.float32(1)
    return round_to(np.float32(x) * multiplier, dtype) / np.float64(multiplier)


def tiles(x, rows, columns, quantize):
    """Apply `quantize` to each tile of a matrix."""
    y = np.zeros(x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            y[i : i + rows, j : j + columns] = quantize(x[i : i + rows, j : j + columns])
    return y


def power_of_two_tile(x):
    """Round to E4M3 with the multiplier of `per_tensor` rounded down to a power of two."""
    multiplier = 2.0 ** np.floor(np.log2(448 / np.abs(x).max().astype(np.float64)))
    return round_to(x * multiplier, E4M3) / multiplier


def mx_tile(x):
    scale = 2.0 ** (np.floor(np.log2(np.abs(x).max().astype(np.float64))) - 8)
    return round_to(x / scale, E4M3) * scale


def products(x, weight, gradient, quantize_input, quantize_weight, quantize_gradient):
    """Return y, dx and dW of y = x Wᵀ; x is [rows, in], W [out, in], the gradient [rows, out]."""
    y = quantize_input(x) @ quantize_weight(weight).T
    x_gradient = quantize_gradient(gradient) @ quantize_weight(weight.T).T
    return y, x_gradient, quantize_gradient(gradient.T) @ quantize_input(x.T).T


def nvfp4(x, rows, columns, amax=None):
    """Round to E2M1 with an E4M3 scale per tile and a float32 scale for `amax`."""
    amax = np.float32(np.abs(x).max() if amax is None else amax)
    tensor = np.float32(1) / (np.float32(6 * 448) / amax)

    def quantize(tile):
        scale = round_to(np.float32(np.abs(tile).max()) / np.float32(6) / tensor, E4M3)
        if scale == 0:
            return np.zeros(tile.shape)
        inverse = np.float32(1) / (np.float32(scale) * tensor)
        return round_to(np.float32(tile) * inverse, E2M1) * scale * np.float64(tensor)

    return tiles(x, rows, columns, quantize)


def hadamard(x, signs):
    """Transform each 16 consecutive values of the last dim by the signs and an orthogonal Hadamard matrix."""
    matrix = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]) / 4
    return np.float32((x.reshape(x.shape[0], -1, 16) * signs) @ matrix.T).reshape(x.shape)
