"""Processes of a job: their start, supervision and end."""
