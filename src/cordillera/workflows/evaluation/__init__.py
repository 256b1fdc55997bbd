"""What an evaluation can tell beyond the metrics of a split."""
