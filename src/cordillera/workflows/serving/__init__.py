"""What answers requests: a server, and the scorers of ranking runs."""
