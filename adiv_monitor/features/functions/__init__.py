"""How functions use parameters: one file per family."""
