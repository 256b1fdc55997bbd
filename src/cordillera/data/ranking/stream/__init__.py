"""Streams of events and of labels that arrive after them, joined in time order."""
