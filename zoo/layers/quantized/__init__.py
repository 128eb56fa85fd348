"""Linear layers whose weight matrix is stored quantized."""
