"""Small kernels of the protocols that our kernels for 9.0 and 12.x are made of."""
