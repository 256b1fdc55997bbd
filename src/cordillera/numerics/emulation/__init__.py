"""Emulation of training in other number formats (the BFLOAT16 study)."""
