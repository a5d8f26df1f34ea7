"""Runs random calls of hypothesis for a time, and shrinks the first one that fails."""

import contextlib
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import jax
from hypothesis import HealthCheck, Phase, given, seed, settings

from .calls import Call
from .checks import GpuLost, Program, refuse_if_lost
from .operations._draws import CPU, Sizes
from .strategies import calls

CLEARED_EVERY = 40
QUIET = settings(
    max_examples=10**6,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    print_blob=False,
)


class TimeIsUp(BaseException):
    """Not an Exception, which hypothesis would treat as a failure."""


@dataclass
class Search:
    """A search of one operation.

    Attributes:
        operation: its name.
        seconds: how long.
        seed: of what is drawn.
        sizes: of the arrays, and the platform whose kernels are asked for.
        log: a file to which failures are appended while the search goes on; without one it stops at the first.
        shrinking: seconds for which a failing call is made smaller.
        ran, refused, programs: counts, of calls and of programs.
        failures: by what was drawn.
        seen: the programs so far.
    """

    operation: str
    seconds: float
    seed: int
    sizes: Sizes = CPU
    log: Path | None = None
    shrinking: float = 30.0
    ran: int = 0
    refused: int = 0
    programs: int = 0
    failures: dict[str, Exception] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        on = f" on {self.sizes.platform}" if self.sizes.platform else ""
        refused = f", {self.refused} refused" if self.refused else ""
        return (
            f"{self.operation}{on}: {self.ran} calls of {self.programs} programs{refused}, {len(self.failures)} failed"
        )

    def run(self) -> None:
        """Raises AssertionError with a snippet of Python for a failing call, and if every call was refused.

        A CUDA error ends the search, and every later one of the process.
        """
        refuse_if_lost()
        self.end = time.monotonic() + self.seconds
        try:
            with contextlib.suppress(TimeIsUp):
                seed(self.seed)(QUIET(given(calls(self.operation, self.sizes))(self._example)))()
        except GpuLost as error:
            self._write(error)
            raise AssertionError(f"the GPU of this process is lost: {error}") from error
        assert not self.failures, f"{len(self.failures)} calls failed; they stand in {self.log}"
        assert self.ran, f"{self}: every call was refused"

    def _example(self, drawn: list[Call]) -> None:
        known = self.failures.get(repr(drawn))
        if known is not None and self.log is None:
            raise known
        if self.programs and time.monotonic() > self.end:
            if self.failures and self.log is None:
                return  # shrunk for long enough: no other call fails from now on
            raise TimeIsUp
        name = repr(drawn[0].program)
        if name in self.seen and (self.log or not self.failures):
            return  # hypothesis often repeats earlier calls
        self.seen.add(name)
        self.programs += 1
        if self.programs % CLEARED_EVERY == 0:
            jax.clear_caches()
        program = Program.of(drawn[0])
        for call in drawn:
            try:
                ran = program.check(call)
            except Exception as error:  # an AssertionError, or an error of this search itself
                return self._failed(drawn, error)
            self.ran += ran
            self.refused += not ran
            if not ran or time.monotonic() > self.end:
                return  # refused for any values

    def _failed(self, drawn: list[Call], error: Exception) -> None:
        if not self.failures and self.log is None:
            self.end = time.monotonic() + self.shrinking
        self.failures[repr(drawn)] = error
        if self.log is None:
            raise error
        self._write(error, f"of {drawn}")

    def _write(self, error: BaseException, of: str = "") -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write("".join(traceback.format_exception(error)[-3:]) + f"{of}\n\n")
