"""Traces of collective communication, and the ranks that a hang or slowness comes from."""
