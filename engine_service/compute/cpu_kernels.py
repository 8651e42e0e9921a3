"""Which kernels a CPU computes with: the switch in kernels.cpu, as the config says.

Owns the time at which they are compiled, which is before the engine serves: no request waits for it.
"""

import time

import structlog
import torch

from kvkeeper.common.service.process import StartError
from kvkeeper.kernels.cpu import compiled
from kvkeeper.kernels.cpu.features import multiplies_bfloat16

from ..config import EngineConfig, wants_compiled

log = structlog.get_logger()


def switch_kernels(config: EngineConfig) -> None:
    """Turn the compiled kernels on where the config wants them and they are installed, and off where not.

    Raises StartError where they are asked for by name and cannot be loaded; else torch computes, and the log says why.
    """
    is_on = wants_compiled(config) and compiled.is_installed()
    try:
        compiled.switch(on=is_on)
    except (ImportError, OSError) as error:  # numba asks the system for its processors when it is imported
        why = f"{type(error).__name__}: {error}"
        if config.cpu_kernels == "compiled":
            raise StartError(f"--cpu-kernels compiled: they cannot be loaded: {why}") from None
        log.warning("kernels_not_loaded", why=why)


def prepare_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """Load the kernels that a model of this dtype is computed with; nothing where they do not serve it."""
    if not compiled.serves(torch.empty(0, dtype=dtype, device=device)):
        return
    log.info("starting", doing="loading the kernels for this CPU; the first start compiles them")
    started = time.monotonic()
    compiled.prepare(dtype)
    taken = round(time.monotonic() - started, 2)
    name, has_bfloat16 = compiled.DTYPES[dtype], multiplies_bfloat16()
    log.info("kernels_loaded", dtype=name, duration_s=taken, are_kept=compiled.are_kept(), multiplies_bfloat16=has_bfloat16)
