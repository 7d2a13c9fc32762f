"""Runs `test_moe_torchtitan` beside torchtitan and the few packages that its experts import.

Torchtitan depends on wandb, datasets and others, too, which experts do not need, so the tests'
environment does not have it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PACKAGES = ("torchtitan==0.3.0", "spmd_types==0.2.3", "tyro==1.0.17", "docstring_parser==0.18.0")


@pytest.mark.slow  # waits for a package registry, for 200 MB if triton is not installed
@pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan 0.3 needs Python 3.11")
def test_the_overrides_compute_what_torchtitan_does() -> None:
    try:
        import triton  # noqa: F401

        packages = PACKAGES
    except ImportError:
        packages = (*PACKAGES, "triton==3.9.0")  # which a CPU build of torch does not bring
    # Not tmp_path, which pytest keeps: triton is 1 GB.
    with tempfile.TemporaryDirectory() as site:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site]
        subprocess.run([*pip, *packages], check=True)
        pytest_command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0"]
        paths = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [*pytest_command, Path(__file__).with_name("test_moe_torchtitan.py")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout
