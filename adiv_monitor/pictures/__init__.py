"""What is drawn of layers by steps: one heat map, its colours, and pictures of it."""
