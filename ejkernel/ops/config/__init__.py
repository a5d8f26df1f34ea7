"""Where the config of a call comes from: selection, caches, files, shipped tables."""
