"""Engines that answer: text from language models."""
