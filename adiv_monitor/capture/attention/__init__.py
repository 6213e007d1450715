"""Attention: which samples are kept, and how their scores move."""
