"""Attention: the choice of sampled calls, and how a step moves their scores."""
