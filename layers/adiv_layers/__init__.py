"""Layers under which a gradient step moves activations straight downhill."""
