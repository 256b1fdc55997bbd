"""Click logs for ranking models."""
