"""Checkpoints of language models for other programs."""
