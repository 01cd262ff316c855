"""Numeric kernels on plain tensors. `reference` is the definition; faster implementations must equal it.

`cpu` has compiled loops for the CPU, the `triton_` modules have GPU kernels, and `triton_dispatch` chooses by the
tensor's device. Importing this package imports none of them.
"""
