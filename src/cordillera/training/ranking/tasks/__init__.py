"""Training of several tasks on one shared representation."""
