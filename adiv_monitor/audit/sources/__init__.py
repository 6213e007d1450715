"""Where what is audited comes from: model, weights, data, loss and optimizer, each by name."""
