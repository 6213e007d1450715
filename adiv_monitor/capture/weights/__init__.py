"""The provenance of weights: parameters, pieces of parameters, and tensors derived from them."""
