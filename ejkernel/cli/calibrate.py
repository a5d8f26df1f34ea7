"""Measures the copy bandwidth and matrix rates of this machine's device, and keeps them."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(arguments: argparse.Namespace) -> int:
    """Prints each measurement as it is made; 1 if they could not be kept, for which a warning gives the reason."""
    from ..callib import calibrate, known_ceilings

    ceilings = calibrate(tell=print)
    if known_ceilings(ceilings.device_kind) != ceilings:
        print("not kept")
        return 1
    print(f"kept for {ceilings.device_kind} (jax {ceilings.jax})")
    return 0
