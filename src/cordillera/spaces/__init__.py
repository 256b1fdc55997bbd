"""Search spaces that ship with the library, one TOML file each."""
