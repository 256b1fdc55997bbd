"""Language models, and the files that hold their weights."""
