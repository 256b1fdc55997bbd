"""What is computed: ranking models, and the counter of their cost."""
