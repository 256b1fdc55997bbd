"""Packing of documents into micro-batches."""
