"""Numeric kernels on plain tensors. `reference` is the definition; faster implementations must equal it."""
