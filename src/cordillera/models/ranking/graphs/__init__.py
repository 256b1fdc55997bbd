"""Ranking models described by a graph of operations."""
