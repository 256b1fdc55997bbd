"""Number formats and rounding."""
