"""Checks whether this machine runs its fast kernels: versions, devices, and a small call of every operation.

Each operation is called on each implementation that supports it here, forward and gradient: compiled, run, compared
with the formula in float64, and timed. Errors are in units of that of the formula in the dtypes of the call: up to 2
are right in a forward, and 3 in a gradient. The exit status is 1 if something that should run here does not, or is
wrong.
"""

import argparse
import glob
import sys
from collections.abc import Iterator, Mapping, Sequence

from ..modules._operation import OPERATIONS
from ..ops.utils.devices import device_target
from ..types import Backend, Platform, Target
from ._checks import PASSES, Check, Outcome, first_line, place, prepare
from ._devices import PLUGINS, available, missing_backend
from ._table import print_rows, print_table
from ._versions import PACKAGES, misfits, required, version, versions

_TRITON = ("triton", "jax-triton")
# Of each platform: its device, the files that its driver makes, and the package by which JAX sees the device.
_DRIVERS = {
    "cuda": ("an NVIDIA GPU", "/dev/nvidia[0-9]*", "jax[cuda13]"),
    "rocm": ("an AMD GPU", "/dev/kfd", "jax[rocm7-local]"),
    "tpu": ("a TPU", "/dev/accel[0-9]*", "jax[tpu]"),
}

Outcomes = Mapping[tuple[str, str], Mapping[str, Outcome]]
"""By operation and implementation: the outcome of each pass that it is registered for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables, then what is wrong; 1 if anything is."""
    del arguments
    print_rows("Versions", _versions())
    devices = {platform: available(platform) for platform in PLUGINS}
    print_rows("Devices", devices)
    sys.stdout.flush()
    wrong = list(_unused_devices(devices))
    if reason := missing_backend():
        wrong.append(f"JAX has no device to run on: {reason}")
    else:
        target = device_target()
        outcomes = _outcomes(target)
        usable = _usable(outcomes)
        print_rows(f"Implementations on {target}", usable)
        _print_calls(outcomes, usable)
        wrong += _complaints(outcomes, target)
    for sentence in wrong or ["All that should run here does, and its numbers are right."]:
        print(sentence)
    return 1 if wrong else 0


# --- Versions and devices


def _versions() -> dict[str, str]:
    """The versions of packages and installed plugins, each with its unsatisfied requirements."""
    plugins = [name for names in PLUGINS.values() for name in names]
    runtimes = [name.replace("-plugin", "-pjrt") for name in plugins if name.endswith("-plugin")]
    shown = versions(*(name for name in (*plugins, *runtimes) if version(name)))
    rows = {name: found or "not installed" for name, found in shown.items()}
    for package, misfit in misfits((*PACKAGES, *plugins, *runtimes)):
        rows[package] += f", {misfit}"
    return rows


def _unused_devices(devices: Mapping[str, str]) -> Iterator[str]:
    """Devices whose driver is installed and that JAX does not see, unless JAX_PLATFORMS leaves them out."""
    for platform, (device, files, package) in _DRIVERS.items():
        if devices[platform].startswith("none: ") and "leaves it out" not in devices[platform] and glob.glob(files):
            absent = not any(map(version, PLUGINS[platform]))
            advice = f"; install what it needs: pip install -U '{package}'" if absent else ""
            yield f"There is {device}, but JAX sees {devices[platform]}{advice}"


# --- Calls


def _outcomes(target: Target) -> Outcomes:
    checks = [Check(operation, target) for operation in OPERATIONS]
    prepare(checks)
    return {key: passes for check in checks for key, passes in _outcomes_of(check).items()}


def _outcomes_of(check: Check) -> Outcomes:
    """The outcomes of one operation, by descending priority."""
    try:
        candidates = check.candidates
    except Exception as error:
        failed = Outcome(trouble=f"cannot be called: {type(error).__name__}: {first_line(error)}")
        return {(check.operation, "any"): dict.fromkeys(check.kernels, failed)}
    found: dict[tuple[str, str], dict[str, Outcome]] = {}
    by_priority = sorted(
        (-candidate[0].priority, i, name, candidate)
        for name, of in candidates.items()
        for i, candidate in enumerate(of)
    )
    for *_, name, candidate in by_priority:
        found.setdefault((check.operation, place(candidate[0])), {})[name] = check.outcome(name, candidate)
    return found


def _usable(outcomes: Outcomes) -> dict[str, str]:
    """For each implementation, how many of the calls it takes, or the one reason why it takes none."""
    every: dict[str, list[Outcome]] = {}
    for (_, implementation), passes in outcomes.items():
        every.setdefault(implementation, []).extend(passes.values())
    return {name: _summary(of) for name, of in every.items()}


def _summary(outcomes: Sequence[Outcome]) -> str:
    reasons = [outcome.reason for outcome in outcomes if outcome.reason]
    if len(reasons) == len(outcomes) and len(set(reasons)) == 1:
        return f"none: {reasons[0]}"
    return f"takes {len(outcomes) - len(reasons)} of {len(outcomes)} calls"


def _print_calls(outcomes: Outcomes, usable: Mapping[str, str]) -> None:
    """Prints a row for each operation and implementation, except those that take no call for a single reason."""
    header = ("operation", "implementation", *(cell for name in PASSES for cell in (f"{name} ms", "error")), "verdict")
    rows = [
        (operation, implementation, *(cell for name in PASSES for cell in _cells(passes.get(name))), _verdict(passes))
        for (operation, implementation), passes in outcomes.items()
        if not usable[implementation].startswith("none: ")
    ]
    print_table(header, rows)
    print()


def _cells(outcome: Outcome | None) -> tuple[str, str]:
    number = lambda x, digits: "" if x is None else f"{x:.{digits}f}"
    return ("", "") if outcome is None else (number(outcome.milliseconds, 3), number(outcome.error, 2))


def _verdict(passes: Mapping[str, Outcome]) -> str:
    """The verdict "right", or what is wrong in each pass."""
    said = {name: passes[name].trouble or passes[name].reason for name in PASSES if name in passes}
    if set(said.values()) == {""}:
        return "right"
    if len(set(said.values())) == 1 and len(said) == len(PASSES):
        return next(iter(said.values()))
    return "; ".join(f"{name} {text or 'right'}" for name, text in said.items())


# --- What is wrong


def _complaints(outcomes: Outcomes, target: Target) -> Iterator[str]:
    every = [outcome for passes in outcomes.values() for outcome in passes.values()]
    if bad := sum(bool(outcome.trouble) for outcome in every):
        yield f"{bad} of {sum(not outcome.reason for outcome in every)} calls fail or are wrong."
    if target.backend not in (Backend.GPU, Backend.TPU):
        return
    if slow := _without_kernels(outcomes, target):
        yield f"XLA computes what has no kernel here: {', '.join(slow)}."
    reasons = {
        outcome.reason
        for (_, implementation), passes in outcomes.items()
        for outcome in passes.values()
        if implementation.startswith(f"{Platform.TRITON}/")
    }
    if target.backend == Backend.GPU and len(reasons) == 1 and "" not in reasons:
        yield f"Triton cannot be used: {reasons.pop()}{_advice()}."


def _without_kernels(outcomes: Outcomes, target: Target) -> list[str]:
    """The passes of operations that have kernels for such a device, none of which takes the call."""
    takes: dict[str, bool] = {}
    for (operation, implementation), passes in outcomes.items():
        platform, _, backend = implementation.partition("/")
        for name, outcome in passes.items() if platform != Platform.XLA and backend == target.backend else ():
            call = f"{operation} {name}"
            takes[call] = takes.get(call, False) or not outcome.reason
    return [call for call, taken in takes.items() if not taken]


def _advice() -> str:
    """What to install so that Triton kernels can be launched; empty if nothing is missing."""
    if sys.version_info < (3, 12):
        return f"; jax-triton 0.4 needs Python 3.12 or later, and this is {sys.version.split()[0]}"
    wanted = required("ejkernel", _TRITON) or list(_TRITON)
    absent = [package for package in _TRITON if version(package) is None]
    unfit = [misfit for _, misfit in misfits(("ejkernel", *_TRITON))]
    if not absent and not unfit:
        return ""
    return f"; install what it needs: pip install -U {' '.join(map(repr, wanted))}"
