"""Triton kernels of what is measured on a GPU, where launches cost more than arithmetic."""
