"""Pages about ranking models."""
