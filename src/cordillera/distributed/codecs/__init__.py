"""Codecs: tensors as self-describing frames of bytes, lossless or within a stated error, and their selection."""
