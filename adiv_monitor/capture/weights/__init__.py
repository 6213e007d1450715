"""What weights are made of: parameters, pieces of them, and what is derived."""
