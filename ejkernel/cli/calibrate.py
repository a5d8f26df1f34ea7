"""Measures the ceilings of this machine's device and keeps them."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: there is nothing to choose."""


def run(arguments: argparse.Namespace) -> int:
    """Prints each measurement as it is made."""
    from ..callib import calibrate

    ceilings = calibrate(tell=print)
    print(f"kept for {ceilings.device_kind} (jax {ceilings.jax})")
    return 0
