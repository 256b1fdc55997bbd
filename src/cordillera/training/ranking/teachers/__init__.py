"""Teachers of ranking models: distillation into students, and versions that learn from streams."""
