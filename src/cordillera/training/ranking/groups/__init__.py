"""Metrics of the order within groups of samples, such as the candidates of one request."""
