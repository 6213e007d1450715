"""Records what happens in a step: the rows of each layer with their gradients, and parameters."""
