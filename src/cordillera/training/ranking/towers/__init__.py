"""Training over several hosts of which each computes a tower of the model."""
