"""Embedding kernels."""
