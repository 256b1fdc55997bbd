"""Serving of ranking models."""
