"""Ranking and language models, and a counter of their cost."""
