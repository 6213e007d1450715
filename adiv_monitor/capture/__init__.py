"""What is seen of a step: the rows of its layers, with their gradients, and its parameters."""
