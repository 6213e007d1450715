"""Drawings of layers by steps: the heat map, its colours, and pictures of it."""
