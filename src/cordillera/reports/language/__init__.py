"""Pages about language models."""
