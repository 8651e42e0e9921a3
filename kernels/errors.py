"""Errors of the ops: an error names the op, the argument and the problem."""


class KernelError(Exception):
    """Base of the errors that ops raise on purpose."""


class KernelArgumentError(KernelError, ValueError):
    """An argument has the wrong shape, stride, dtype or value."""

    def __init__(self, op: str, argument: str, problem: str) -> None:
        super().__init__(f"{op}: {argument} {problem}")
        self.op = op
        self.argument = argument
        self.problem = problem


class UnsupportedDeviceError(KernelError, RuntimeError):
    """The op has no implementation for the device that its tensors are on."""

    def __init__(self, op: str, device: str) -> None:
        super().__init__(f"{op}: no implementation for device {device!r}; available: cpu, cuda")
        self.op = op
        self.device = device
