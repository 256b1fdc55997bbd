"""Collectives of our own between processes: transport, plans that are run, and a backend of torch.distributed."""
