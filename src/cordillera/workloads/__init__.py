"""Workloads that ship with the library, one TOML file each; read by :func:`cordillera.planning.workloads.load`."""
