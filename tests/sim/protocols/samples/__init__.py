"""Small kernels with the protocols (TMA, mbarriers, wgmma) of our kernels for 9.0 and 12.x."""
