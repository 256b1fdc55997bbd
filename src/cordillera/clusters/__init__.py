"""Clusters that ship with the library, one TOML file each; read by :func:`cordillera.topology.load`."""
