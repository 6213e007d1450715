"""Illnesses by where they are planted."""
