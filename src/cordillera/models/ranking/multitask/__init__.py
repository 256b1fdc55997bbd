"""Models whose tasks share a part of their trunks."""
