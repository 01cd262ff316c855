"""Error analysis: what quantizations did to weights (tensors.py) and to matrix products (gemm.py), and a summary."""
