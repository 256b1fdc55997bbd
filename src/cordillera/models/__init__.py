"""What is computed: ranking and language models, and the counter of their cost."""
