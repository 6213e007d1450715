"""The training runs of an audit: setups, their forks (copies to train), batches, the loop."""
