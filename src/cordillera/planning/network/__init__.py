"""Networks: cost and plans of collectives."""
