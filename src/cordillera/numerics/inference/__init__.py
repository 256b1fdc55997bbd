"""Choice of precisions for inference, and detection of drift (low-precision inference)."""
