"""Training that continues while a replica is absent (FT-HSDP): the members of each step, and the cost of failures."""
