"""Bit flips and their effects (PVF)."""
