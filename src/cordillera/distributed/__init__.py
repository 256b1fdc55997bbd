"""Parallelism over devices that share one model, as planned by the planner."""
