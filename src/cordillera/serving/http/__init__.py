"""An HTTP server of language models and ranking models."""
