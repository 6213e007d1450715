"""Triton kernels for measuring on a GPU, where launches cost more than arithmetic."""
