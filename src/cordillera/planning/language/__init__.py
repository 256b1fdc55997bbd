"""Plans for language models."""
