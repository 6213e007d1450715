"""Triton kernels behind `adiv_layers.ops`; imported only when there is a device to run them."""
