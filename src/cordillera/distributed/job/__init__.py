"""Processes of a job: start, watch, end."""
