"""Quantised layers and rows (FBGEMM)."""
