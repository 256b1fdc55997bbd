"""Training that goes on while a replica is absent (FT-HSDP): who takes part in which step, and what failures cost."""
