"""What machine this is, as far as timings depend on it. Knows nothing of stages."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any


def cpu_name() -> str:
    """The processor's name with its core count, as the kernel gives it."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def device_name(device: str) -> str:
    """Human name of a torch device."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return cpu_name()


def machine_facts(*, device: str, threads: int, dtype: str) -> dict[str, Any]:
    """What the key of a timed stage depends on besides its inputs."""
    import torch

    return {"device": device_name(device), "threads": threads, "dtype": dtype, "torch": torch.__version__}


def resident_mb() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_resident_mb() -> float:
    """Highest resident memory of this process since `reset_peak_resident`, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return resident_mb()


def reset_peak_resident() -> None:
    """Starts `peak_resident_mb` afresh where the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class PrivateMemory:
    """By how much this process's own memory has grown at most since this was made, in MiB.

    Pages of mapped files don't count: while weights are loaded they would appear twice, and the kernel drops them when
    it wants to. The kernel keeps no peak of the rest, so a thread looks.
    """

    _EVERY_S = 0.01

    def __init__(self) -> None:
        self._before = self._highest = self._now()
        threading.Thread(target=self._watch, daemon=True).start()

    def peak_mb(self) -> float:
        """Until now."""
        return max(self._highest, self._now()) - self._before

    def _watch(self) -> None:
        while True:
            self._highest = max(self._highest, self._now())
            time.sleep(self._EVERY_S)

    @staticmethod
    def _now() -> float:
        resident, mapped = Path("/proc/self/statm").read_text().split()[1:3]
        return (int(resident) - int(mapped)) * os.sysconf("SC_PAGE_SIZE") / 2**20
