"""Which kernels a CPU computes with: the switch in kernels.cpu, as the config says.

Owns the time at which they are compiled, which is before the model is loaded: no request waits for it.
"""

import time

import structlog

from kvkeeper.kernels.cpu import compiled

from ..config import EngineConfig, wants_compiled

log = structlog.get_logger()


def switch_kernels(config: EngineConfig) -> None:
    """Load the compiled kernels where the config wants them and they are installed, and turn them off where not."""
    is_on = wants_compiled(config) and compiled.is_installed()
    if is_on:
        log.info("starting", doing="loading the kernels for this CPU; the first start compiles them")
    started = time.monotonic()
    compiled.switch(on=is_on)
    if is_on:
        log.info("kernels_loaded", duration_s=round(time.monotonic() - started, 2), are_kept=compiled.are_kept())
