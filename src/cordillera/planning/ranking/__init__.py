"""Plans for ranking models."""
