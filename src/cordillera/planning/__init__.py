"""Cost predicted and plans searched, from one node to several buildings. Nothing here imports torch."""
