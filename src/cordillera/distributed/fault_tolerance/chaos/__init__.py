"""Faults that are injected into a running job of replicas, from outside of its processes."""
