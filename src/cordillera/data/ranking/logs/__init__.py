"""Readers of click logs."""
