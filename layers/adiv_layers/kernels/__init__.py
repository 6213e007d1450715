"""Triton kernels of `adiv_layers.ops`, imported only if there is a device to run them."""
