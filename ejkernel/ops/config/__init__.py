"""The sources of configs: their selection, caches in memory, files and shipped tables."""
