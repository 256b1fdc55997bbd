"""Packing of documents into microbatches."""
