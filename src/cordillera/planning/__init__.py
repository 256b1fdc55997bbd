"""Cost predictions and searches for plans, from one node to several buildings, without importing torch."""
