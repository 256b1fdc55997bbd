"""Gradients of embedding tables between a backward pass and the next update."""
