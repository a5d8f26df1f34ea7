"""Whether JAX assembles kernels of Mosaic GPU as they are meant, which its CUDA plugin does not since version 0.12.

That plugin assembles PTX with nvJitLink where it finds the library, which `jax[cuda13]` and `jax[cuda12]` install; the
plugins before it with ptxas. nvJitLink makes relocatable code, as `ptxas -c` does: `setmaxnreg` is ignored, so that
consumers have too few registers, and every wgmma waits for the one before, which are the remarks C7504, C7509 and
C7512. Attention on an H200 then takes 1.6 to 3 times as long, longer than in Triton, whose kernels stay as fast.
"""

import ctypes
import functools
from importlib import metadata

# By the major version of CUDA: where the plugin looks for the library, beside the packages of Python.
_FOLDERS = {13: "nvidia/cu13/lib", 12: "nvidia/nvjitlink/lib"}
_SINCE = (0, 12)


@functools.cache
def serializes() -> str | None:
    """A sentence on the plugin that is installed, if it assembles with nvJitLink; else None."""
    for cuda, folder in _FOLDERS.items():
        plugin, library = _plugin(cuda), f"libnvJitLink.so.{cuda}"
        if plugin is None or tuple(map(int, plugin.version.split(".")[:2])) < _SINCE:
            continue
        if plugin.locate_file(f"{folder}/{library}").exists() or _loads(library):
            return (
                f"the CUDA plugin of jax {plugin.version} assembles with nvJitLink, by which products of these kernels "
                "wait for one another; that of jax below 0.12 does not"
            )
    return None


def _plugin(cuda: int) -> metadata.Distribution | None:
    try:
        return metadata.distribution(f"jax-cuda{cuda}-pjrt")
    except metadata.PackageNotFoundError:
        return None


def _loads(library: str) -> bool:
    """Whether the system finds a library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
