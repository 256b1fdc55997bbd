"""Search for architectures: trials of candidates, and the search itself."""
