"""The schedule of learning rates that follows measured alignments."""
