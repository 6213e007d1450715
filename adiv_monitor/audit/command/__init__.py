"""The command `adiv-audit`: what it is told, what it prints and writes."""
