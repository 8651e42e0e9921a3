"""What errors of CUDA mean for the operator, and what to do: one table, by the names of the runtime and of the driver.

It knows the numbers of the runtime, too, and the words with which CUDA reports an error, because some libraries hand on no more
than these. Pure: it knows names and sentences, and no CUDA. A name that is not here is shown as it is.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meaning:
    """what: went wrong. mend: what helps. Both without a full stop, to stand behind the name.

    is_sticky: whether all later work of the process on the device fails, so that only another process can go on.
    """

    what: str
    mend: str
    is_sticky: bool = False

    def __str__(self) -> str:
        return f"{self.what}; {self.mend}"


NO_MEMORY = Meaning(
    "the device has not so much memory left",
    "lower --pool-memory, or end what else has memory there, which nvidia-smi shows",
)
_NO_DEVICE = Meaning(
    "no CUDA device is visible to this process",
    "see that nvidia-smi shows one, that a container is given it (--gpus all), and what CUDA_VISIBLE_DEVICES says",
)
_WRONG_DEVICE = Meaning("there is no device of this number", "see nvidia-smi -L and CUDA_VISIBLE_DEVICES")
_OLD_DRIVER = Meaning(
    "the driver is too old for this CUDA, or its parts are of two versions",
    "install a newer driver, or restart the host after one was installed",
)
_NOT_STARTED = Meaning(
    "CUDA could not be started in this process",
    "see nvidia-smi and the kernel's log (dmesg, Xid); the driver's modules may have to be loaded again",
)
_TAKEN = Meaning(
    "the device is another process's alone",
    "let several processes use it, because the cache service and each engine are one: nvidia-smi -c DEFAULT",
)
_NOT_READY = Meaning("the device is not ready", "see that nvidia-fabricmanager runs")
_STUB = Meaning("a stand-in of libcuda for builds was loaded", "take the folder 'stubs' out of LD_LIBRARY_PATH")
_GONE = Meaning(
    "the memory has ended with the process that made it, or is of another host",
    "see whether the cache service was restarted; an engine opens a new session by itself",
)
_OWN = Meaning("the process has no context there, or made the memory itself", "open it in another process")
_NOT_MAPPED = Meaning(
    "memory of another process could not be mapped",
    "run both services with one IPC and one PID namespace (docker: --ipc and --pid), or in one container",
)
_NOT_SUPPORTED = Meaning(
    "this device, driver or sandbox does not have the call",
    "see make gpu-check PARTS=m; virtual machines, MIG and sandboxes may refuse memory between processes",
)
_NOT_PERMITTED = Meaning("the system does not permit the call", "see the rights of the container and of /dev/nvidia*")
_SYSTEM = Meaning(
    "the operating system refused",
    "see how much memory may be locked (ulimit -l, LimitMEMLOCK=), and how much of it is free",
)
_PINNED = Meaning("the memory is pinned already", "report it: kvkeeper pins each arena once")
_BAD_ACCESS = Meaning(
    "a kernel went wrong, as by touching memory that is not its own, and all later work of this process on the device fails",
    "restart the service; set CUDA_LAUNCH_BLOCKING=1 to see which kernel, and report it",
    is_sticky=True,
)
_SLOW_KERNEL = Meaning("the driver ended a kernel that ran too long", "use a device that shows no screen", is_sticky=True)
_DAMAGED = Meaning(
    "the device's memory has an error that cannot be corrected",
    "see nvidia-smi -q -d ECC, reset or replace the device, and throw away what was kept in its memory",
    is_sticky=True,
)
_BAD_LINK = Meaning(
    "a link between devices or other hardware failed",
    "see nvidia-smi nvlink -e and the kernel's log (dmesg, Xid); reset or replace the device",
    is_sticky=True,
)
_NO_CONTEXT = Meaning(
    "what this process had on the device was ended from outside",
    "restart the service; see whether the device was reset, and where MPS runs, its log",
    is_sticky=True,
)
_OTHER_CODE = Meaning("no kernel was built for this device", "see that torch and triton serve its compute capability")

# By the runtime's names: what the error means, its number, which the driver has, too, and the words in which it is reported.
# Where they are empty, an error is known by its number alone.
_ERRORS = {
    "MemoryAllocation": (NO_MEMORY, 2, "out of memory"),
    "InitializationError": (_NOT_STARTED, 3, "initialization error"),
    "StubLibrary": (_STUB, 34, ""),
    "InsufficientDriver": (_OLD_DRIVER, 35, "CUDA driver version is insufficient for CUDA runtime version"),
    "DevicesUnavailable": (_TAKEN, 46, "CUDA-capable device(s) is/are busy or unavailable"),
    "NoDevice": (_NO_DEVICE, 100, "no CUDA-capable device is detected"),
    "InvalidDevice": (_WRONG_DEVICE, 101, "invalid device ordinal"),
    "DeviceUninitialized": (_OWN, 201, "invalid device context"),
    "MapBufferObjectFailed": (_NOT_MAPPED, 205, "mapping of buffer object failed"),
    "NoKernelImageForDevice": (_OTHER_CODE, 209, "no kernel image is available for execution on the device"),
    "ECCUncorrectable": (_DAMAGED, 214, "uncorrectable ECC error encountered"),
    "NvlinkUncorrectable": (_BAD_LINK, 220, "uncorrectable NVLink error detected during the execution"),
    "Contained": (_BAD_LINK, 226, "Invalid access of peer GPU memory over nvlink or a hardware error"),
    "OperatingSystem": (_SYSTEM, 304, "OS call failed or operation not supported on this OS"),
    "InvalidResourceHandle": (_GONE, 400, "invalid resource handle"),
    "IllegalAddress": (_BAD_ACCESS, 700, "an illegal memory access was encountered"),
    "LaunchTimeout": (_SLOW_KERNEL, 702, "the launch timed out and was terminated"),
    "ContextIsDestroyed": (_NO_CONTEXT, 709, "context is destroyed"),
    "Assert": (_BAD_ACCESS, 710, "device-side assert triggered"),
    "HostMemoryAlreadyRegistered": (_PINNED, 712, "part or all of the requested memory range is already mapped"),
    "HardwareStackError": (_BAD_ACCESS, 714, "hardware stack error"),
    "IllegalInstruction": (_BAD_ACCESS, 715, "an illegal instruction was encountered"),
    "MisalignedAddress": (_BAD_ACCESS, 716, "misaligned address"),
    "InvalidAddressSpace": (_BAD_ACCESS, 717, "operation not supported on global/shared address space"),
    "InvalidPc": (_BAD_ACCESS, 718, "invalid program counter"),
    "LaunchFailure": (_BAD_ACCESS, 719, "unspecified launch failure"),
    "TensorMemoryLeak": (_BAD_ACCESS, 721, "tensor memory not completely freed"),
    "NotPermitted": (_NOT_PERMITTED, 800, "operation not permitted"),
    "NotSupported": (_NOT_SUPPORTED, 801, "operation not supported"),
    "SystemNotReady": (_NOT_READY, 802, "system not yet initialized"),
    "SystemDriverMismatch": (_OLD_DRIVER, 803, "system has unsupported display driver / cuda driver combination"),
    "CompatNotSupportedOnDevice": (_OLD_DRIVER, 804, ""),
    "MpsClientTerminated": (_NO_CONTEXT, 810, ""),
    "Unknown": (_NOT_STARTED, 999, "unknown error"),
}
# The driver's names where they are other words than the runtime's.
_OF_DRIVER = {
    "OUT_OF_MEMORY": NO_MEMORY,
    "NOT_INITIALIZED": _NOT_STARTED,
    "DEVICE_UNAVAILABLE": _TAKEN,
    "INVALID_HANDLE": _GONE,
    "INVALID_CONTEXT": _OWN,
    "MAP_FAILED": _NOT_MAPPED,
    "LAUNCH_FAILED": _BAD_ACCESS,
    "ECC_UNCORRECTABLE": _DAMAGED,
    "NO_BINARY_FOR_GPU": _OTHER_CODE,
}
MEANINGS = (
    {f"cudaError{name}": meaning for name, (meaning, _, _) in _ERRORS.items()}
    | {"CUDA_ERROR_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper(): error[0] for name, error in _ERRORS.items()}
    | {f"CUDA_ERROR_{name}": meaning for name, meaning in _OF_DRIVER.items()}
)
NAMES_BY_NUMBER = {number: f"cudaError{name}" for name, (_, number, _) in _ERRORS.items()}
NAMES_BY_WORDS = {words: f"cudaError{name}" for name, (_, _, words) in _ERRORS.items() if words}


class CudaError(Exception):
    """A call of CUDA failed. call: name of the call; name: of the error. Neither shows addresses or handles.

    Its text has both, and what they mean where that is known.
    """

    def __init__(self, call: str, name: str) -> None:
        self.call, self.name, self.meaning = call, name, MEANINGS.get(name)
        super().__init__(f"{call}: {name}" if self.meaning is None else f"{call}: {name}: {self.meaning}")

    @property
    def is_out_of_memory(self) -> bool:
        return self.meaning is NO_MEMORY
