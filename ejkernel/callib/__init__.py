"""Calibration: what this device reaches at best, measured. Benchmarks show a fraction of it, tuners order by it."""

from .ceilings import Ceilings, calibrate, known_ceilings

__all__ = ["Ceilings", "calibrate", "known_ceilings"]
