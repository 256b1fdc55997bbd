"""Training over several hosts, each of which computes a tower of the model."""
