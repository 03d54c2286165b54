"""What a measurement ran on: versions of the packages that matter, and the GPU."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess

VERSIONS_OF = ("dflash_sglang", "sglang", "torch", "triton", "flashinfer-python")


def versions() -> dict[str, str]:
    """Versions by package, Python's, and `gpu`: name and driver of each one, or `none`."""
    return {
        **{name: importlib.metadata.version(name) for name in VERSIONS_OF},
        "python": platform.python_version(),
        "gpu": nvidia_smi("name,driver_version") or "none",
    }


def nvidia_smi(fields: str) -> str:
    """`fields` of every GPU, a line each; empty where there is no nvidia-smi, or none that reaches a driver."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
