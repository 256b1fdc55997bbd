"""Precision of storage and computation, its cost, and the effects of bit flips."""
