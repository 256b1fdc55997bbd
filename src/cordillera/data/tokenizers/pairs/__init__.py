"""Encodings by pairs of tokens that are merged, and the rules by which text is changed and split before."""
