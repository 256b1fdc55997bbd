"""Choice of a precision for each layer (LoKA)."""
