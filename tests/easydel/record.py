"""Writes `recorded.json`, the results of the models in `models.py` with the release that EasyDeL 0.3.0 pins.

python -O tests/easydel/record.py CASE …, or all, where easydel==0.3.0, Pillow and torch are installed, and nothing of
this library. `notes`, `as` and `exact`, with which a case is compared, are written by hand and kept.
"""

import json
import sys
from importlib import metadata
from pathlib import Path

import models

RECORDED = Path(__file__).with_name("recorded.json")
PACKAGES = ("easydel", "ejkernel", "jax", "flax", "numpy", "transformers")


def rounded(found):
    """Numbers with 9 digits, which identify a float32."""
    if isinstance(found, float):
        return float(f"{found:.9g}")
    return {name: rounded(x) for name, x in found.items()} if isinstance(found, dict) else found


def versions():
    """Those of the packages that are installed, the release among them."""
    found = {name: metadata.version(name) for name in PACKAGES}
    if found["ejkernel"] != "0.0.78":
        raise SystemExit(f"ejkernel {found['ejkernel']} is installed; this records ejkernel 0.0.78")
    return found


def main(cases):
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"notes": {}, "cases": {}}
    recorded["versions"] = versions()
    for case in cases or models.CASES:
        kept = {name: x for name, x in recorded["cases"].get(case, {}).items() if name in ("as", "exact")}
        recorded["cases"][case] = kept | rounded(models.outcome(case))
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
