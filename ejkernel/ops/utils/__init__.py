"""Utilities of the framework: fingerprints, labels, packing, timing, files that processes share."""
