"""A recorded launch that kills the process which replays it."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

from nvgemm_aot.emulator.mutants.recorded_launch import RecordedLaunch


class DeadlyLaunch(RecordedLaunch):
    """Stands for a changed kernel that damages its process's memory."""

    def replay(self, *_: Any, **__: Any) -> NoReturn:
        """Ends the process as a damaged heap does."""
        os.kill(os.getpid(), signal.SIGABRT)
        raise AssertionError("the process goes on")
