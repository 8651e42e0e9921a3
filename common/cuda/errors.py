"""What errors of CUDA mean for the operator, and what to do: one table, by the names of the runtime and of the driver.

It knows the numbers of the runtime, too, and the words with which CUDA reports an error, because some libraries hand on no more
than these. Pure: it knows names and sentences, and no CUDA. A name that is not here is shown as it is.
"""

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

_MEANINGS: dict[Meaning, str] = {
    NO_MEMORY: "cudaErrorMemoryAllocation CUDA_ERROR_OUT_OF_MEMORY",
    _NO_DEVICE: "cudaErrorNoDevice CUDA_ERROR_NO_DEVICE",
    _WRONG_DEVICE: "cudaErrorInvalidDevice CUDA_ERROR_INVALID_DEVICE",
    _OLD_DRIVER: "cudaErrorInsufficientDriver cudaErrorSystemDriverMismatch cudaErrorCompatNotSupportedOnDevice"
    " CUDA_ERROR_SYSTEM_DRIVER_MISMATCH CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
    _NOT_STARTED: "cudaErrorInitializationError cudaErrorUnknown CUDA_ERROR_NOT_INITIALIZED CUDA_ERROR_UNKNOWN",
    _TAKEN: "cudaErrorDevicesUnavailable CUDA_ERROR_DEVICE_UNAVAILABLE",
    _NOT_READY: "cudaErrorSystemNotReady CUDA_ERROR_SYSTEM_NOT_READY",
    _STUB: "cudaErrorStubLibrary CUDA_ERROR_STUB_LIBRARY",
    _GONE: "cudaErrorInvalidResourceHandle CUDA_ERROR_INVALID_HANDLE",
    _OWN: "cudaErrorDeviceUninitialized CUDA_ERROR_INVALID_CONTEXT",
    _NOT_MAPPED: "cudaErrorMapBufferObjectFailed CUDA_ERROR_MAP_FAILED",
    _NOT_SUPPORTED: "cudaErrorNotSupported CUDA_ERROR_NOT_SUPPORTED",
    _NOT_PERMITTED: "cudaErrorNotPermitted CUDA_ERROR_NOT_PERMITTED",
    _SYSTEM: "cudaErrorOperatingSystem CUDA_ERROR_OPERATING_SYSTEM",
    _PINNED: "cudaErrorHostMemoryAlreadyRegistered CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    _BAD_ACCESS: "cudaErrorIllegalAddress cudaErrorLaunchFailure cudaErrorMisalignedAddress cudaErrorAssert"
    " cudaErrorHardwareStackError cudaErrorIllegalInstruction cudaErrorInvalidAddressSpace cudaErrorInvalidPc"
    " cudaErrorTensorMemoryLeak CUDA_ERROR_ILLEGAL_ADDRESS CUDA_ERROR_LAUNCH_FAILED CUDA_ERROR_MISALIGNED_ADDRESS"
    " CUDA_ERROR_ASSERT CUDA_ERROR_HARDWARE_STACK_ERROR CUDA_ERROR_ILLEGAL_INSTRUCTION CUDA_ERROR_INVALID_ADDRESS_SPACE"
    " CUDA_ERROR_INVALID_PC CUDA_ERROR_TENSOR_MEMORY_LEAK",
    _SLOW_KERNEL: "cudaErrorLaunchTimeout CUDA_ERROR_LAUNCH_TIMEOUT",
    _DAMAGED: "cudaErrorECCUncorrectable CUDA_ERROR_ECC_UNCORRECTABLE",
    _BAD_LINK: "cudaErrorNvlinkUncorrectable cudaErrorContained CUDA_ERROR_NVLINK_UNCORRECTABLE CUDA_ERROR_CONTAINED",
    _NO_CONTEXT: "cudaErrorContextIsDestroyed cudaErrorMpsClientTerminated"
    " CUDA_ERROR_CONTEXT_IS_DESTROYED CUDA_ERROR_MPS_CLIENT_TERMINATED",
    _OTHER_CODE: "cudaErrorNoKernelImageForDevice CUDA_ERROR_NO_BINARY_FOR_GPU",
}
MEANINGS = {name: meaning for meaning, names in _MEANINGS.items() for name in names.split()}

# By names of the runtime: the number, which the driver has, too, and the words in which an error is reported. Where they are
# empty, an error is known by its number alone.
_TOLD = {
    "cudaErrorMemoryAllocation": (2, "out of memory"),
    "cudaErrorInitializationError": (3, "initialization error"),
    "cudaErrorStubLibrary": (34, ""),
    "cudaErrorInsufficientDriver": (35, "CUDA driver version is insufficient for CUDA runtime version"),
    "cudaErrorDevicesUnavailable": (46, "CUDA-capable device(s) is/are busy or unavailable"),
    "cudaErrorNoDevice": (100, "no CUDA-capable device is detected"),
    "cudaErrorInvalidDevice": (101, "invalid device ordinal"),
    "cudaErrorDeviceUninitialized": (201, "invalid device context"),
    "cudaErrorMapBufferObjectFailed": (205, "mapping of buffer object failed"),
    "cudaErrorNoKernelImageForDevice": (209, "no kernel image is available for execution on the device"),
    "cudaErrorECCUncorrectable": (214, "uncorrectable ECC error encountered"),
    "cudaErrorNvlinkUncorrectable": (220, "uncorrectable NVLink error detected during the execution"),
    "cudaErrorContained": (226, "Invalid access of peer GPU memory over nvlink or a hardware error"),
    "cudaErrorOperatingSystem": (304, "OS call failed or operation not supported on this OS"),
    "cudaErrorInvalidResourceHandle": (400, "invalid resource handle"),
    "cudaErrorIllegalAddress": (700, "an illegal memory access was encountered"),
    "cudaErrorLaunchTimeout": (702, "the launch timed out and was terminated"),
    "cudaErrorContextIsDestroyed": (709, "context is destroyed"),
    "cudaErrorAssert": (710, "device-side assert triggered"),
    "cudaErrorHostMemoryAlreadyRegistered": (712, "part or all of the requested memory range is already mapped"),
    "cudaErrorHardwareStackError": (714, "hardware stack error"),
    "cudaErrorIllegalInstruction": (715, "an illegal instruction was encountered"),
    "cudaErrorMisalignedAddress": (716, "misaligned address"),
    "cudaErrorInvalidAddressSpace": (717, "operation not supported on global/shared address space"),
    "cudaErrorInvalidPc": (718, "invalid program counter"),
    "cudaErrorLaunchFailure": (719, "unspecified launch failure"),
    "cudaErrorTensorMemoryLeak": (721, "tensor memory not completely freed"),
    "cudaErrorNotPermitted": (800, "operation not permitted"),
    "cudaErrorNotSupported": (801, "operation not supported"),
    "cudaErrorSystemNotReady": (802, "system not yet initialized"),
    "cudaErrorSystemDriverMismatch": (803, "system has unsupported display driver / cuda driver combination"),
    "cudaErrorCompatNotSupportedOnDevice": (804, ""),
    "cudaErrorMpsClientTerminated": (810, ""),
    "cudaErrorUnknown": (999, "unknown error"),
}
NAMES_BY_NUMBER = {number: name for name, (number, _) in _TOLD.items()}
NAMES_BY_WORDS = {words: name for name, (_, words) in _TOLD.items() if words}


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
