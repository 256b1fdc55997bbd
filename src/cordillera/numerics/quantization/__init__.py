"""Quantized layers and rows (FBGEMM)."""
