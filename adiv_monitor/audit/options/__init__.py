"""The options of the command `adiv-audit`, and how invalid ones are refused."""
