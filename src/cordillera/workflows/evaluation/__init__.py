"""Results of an evaluation beyond the metrics of a split."""
