"""Language models: what is computed, and the files that hold their weights."""
