"""What things cost, measured: the kernels (`kernels`, `cuda`) and a served checkpoint (`serve`). Imports nothing."""
