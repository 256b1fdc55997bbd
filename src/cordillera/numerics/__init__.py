"""In what precision numbers are kept and computed, what that costs, and what a flipped bit does."""
