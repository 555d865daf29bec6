"""The same mathematics on better kernels."""
