"""Scaling laws."""
