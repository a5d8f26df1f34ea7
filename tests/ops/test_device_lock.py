"""The lock of a device: timed programs run alone, beside other threads and other processes."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from shown import TUNED, Shown, ones

from ejkernel.ops import Invocation, Tuner
from ejkernel.ops.utils import device_lock as module
from ejkernel.ops.utils.device_lock import device_lock, lock_path
from ejkernel.ops.utils.shared_file import locked
from ejkernel.ops.utils.timing import batches

HOLDS = """
import fcntl, sys, time
with open(sys.argv[1], "a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(0.3)
    print(time.monotonic(), flush=True)
"""


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "locks" / "device.lock")


def is_free(path, shared):
    try:
        with locked(path, 0, shared):
            return True
    except TimeoutError:
        return False


def test_threads_that_hold_it_never_overlap(path):
    inside, most = 0, []

    def measures():
        nonlocal inside
        for _ in range(10):
            with device_lock(path):
                inside += 1
                time.sleep(1e-3)
                most.append(inside)
                inside -= 1

    threads = [threading.Thread(target=measures) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 40


def test_another_process_is_waited_for(path):
    with device_lock(path):
        pass
    process = subprocess.Popen([sys.executable, "-c", HOLDS, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with device_lock(path):
        acquired = time.monotonic()
    assert acquired >= float(process.communicate()[0])


def test_what_is_not_timed_shares_the_device(path):
    with device_lock(path, shared=True):
        assert is_free(path, shared=True) and not is_free(path, shared=False)
    with device_lock(path):
        assert not is_free(path, shared=True)
    assert is_free(path, shared=False)


def test_without_a_path_nothing_is_locked():
    with device_lock(None), device_lock(None):
        pass


def test_a_tuner_times_alone_and_makes_its_values_beside_others(path, monkeypatch):
    held = []

    def note(what):
        held.append((what, is_free(path, shared=True), is_free(path, shared=False)))

    class Noted(Shown):
        def synthetic_inputs(self, inv):
            note("values")
            return super().synthetic_inputs(inv)

    def noted(*given):
        for milliseconds in batches(*given):
            note("timed")
            yield milliseconds

    monkeypatch.setattr("ejkernel.ops.core.tuner.batches", noted)
    kernel = Noted("noted")
    inv = Invocation(kernel, (jax.ShapeDtypeStruct((4, 4), "float32"),), {})
    assert Tuner(1, 1, lock=path).measure(kernel, inv, [TUNED]).times.keys() == {TUNED}
    assert held == [("values", True, False), ("timed", False, False)]
    held.clear()
    Tuner(1, 1).measure(kernel, Invocation(kernel, (ones(),), {}), [TUNED])
    assert held == [("values", True, True), ("timed", True, True)]


@pytest.mark.parametrize(
    "visible, number, name",
    [({}, 1, "1"), ({"CUDA_VISIBLE_DEVICES": "4,6"}, 1, "6"), ({"HIP_VISIBLE_DEVICES": "2"}, 0, "2")],
)
def test_a_gpu_has_one_lock_however_its_process_numbers_it(monkeypatch, visible, number, name):
    for variable in module._VISIBLE:
        monkeypatch.delenv(variable, raising=False)
    for variable, devices in visible.items():
        monkeypatch.setenv(variable, devices)
    monkeypatch.setattr(module, "default_device", lambda: SimpleNamespace(platform="gpu", local_hardware_id=number))
    assert lock_path().endswith(f"/measuring-gpu-{name}.lock")
