"""The schedule that acts on measured alignments."""
