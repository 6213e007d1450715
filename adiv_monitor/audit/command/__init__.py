"""The command `adiv-audit`: its command line, its output and the files that it writes."""
