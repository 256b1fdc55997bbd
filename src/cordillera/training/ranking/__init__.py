"""Training of ranking models."""
