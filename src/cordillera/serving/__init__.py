"""Inference: text from language models, scores from quantised ranking models."""
