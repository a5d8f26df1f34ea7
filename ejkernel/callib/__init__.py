"""Calibration: the highest rates of this device, measured. Benchmarks show a fraction of it, tuners order by it."""

from .ceilings import Ceilings, calibrate, known_ceilings

__all__ = ["Ceilings", "calibrate", "known_ceilings"]
