"""The sources of an audit's model, weights, data, loss and optimizer, each found by name."""
