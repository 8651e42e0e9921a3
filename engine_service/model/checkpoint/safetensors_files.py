"""Which weight files a model folder has, and reading tensors from them. Only safetensors: nothing is ever unpickled."""

import math
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open

from .errors import ModelConfigError, ModelFileMissingError, UnsupportedModelError, WeightsError
from .json_file import POINTER_SAID, is_pointer, read_json_object

if TYPE_CHECKING:
    import torch  # headers can be read without torch, which takes seconds to import

_ITEM_BYTES: Final = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
}
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


def list_weight_files(folder: Path) -> tuple[Path, ...]:
    """The folder's safetensors files, by name: those that the index names, or the single one.

    Raises:
        ModelFileMissingError: no folder, no weights, or a shard that the index names is absent.
        UnsupportedModelError: only pickled weights (.bin, .pt).
        ModelConfigError: the index is malformed.
        WeightsError: a file is a pointer of git-lfs.
    """
    if not folder.is_dir():
        raise ModelFileMissingError(f"model folder {folder}")
    if (folder / _SINGLE).is_file():
        return (_no_pointer(folder / _SINGLE),)
    if not (folder / _INDEX).is_file():
        pickled = sorted(path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in folder.glob(suffix))
        if pickled:
            raise UnsupportedModelError("weight format", pickled[0], "safetensors (nothing is unpickled)")
        raise ModelFileMissingError(str(folder / _SINGLE))
    weight_map = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelConfigError(_INDEX, "weight_map must be an object that names files")
    names = set(weight_map.values())
    for name in names:  # a plain name: an index must not lead out of its folder
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelConfigError(_INDEX, f"weight_map names {name!r}, not a safetensors file of the folder")
        if not (folder / name).is_file():
            raise ModelFileMissingError(str(folder / name))
    return tuple(_no_pointer(folder / name) for name in sorted(names))


def _no_pointer(path: Path) -> Path:
    """Raises WeightsError."""
    try:
        with path.open("rb") as file:
            if is_pointer(file.read(64)):
                raise WeightsError(path.name, POINTER_SAID)
    except OSError as error:
        raise WeightsError(path.name, f"cannot be read: {error.strerror}") from error
    return path


def iterate_tensors(files: tuple[Path, ...], without: Container[str] = ()) -> Iterator[tuple[str, str, "torch.Tensor"]]:
    """Yield (file name, tensor name, tensor), one tensor in memory at a time.

    without: names of tensors that are not read.

    Raises:
        WeightsError: a file is truncated, has a damaged header, or cannot be read.
    """
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    if name not in without:
                        yield path.name, name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(path.name, f"is damaged or unreadable: {error}") from error


class StoredTensor:
    """A tensor that is not read yet. Its file has to be open, as it is while iterate_stored yields it."""

    def __init__(self, file_name: str, part: Any) -> None:
        self._file_name, self._part = file_name, part

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._part.get_shape())

    @property
    def dtype(self) -> "torch.dtype":
        return self[(slice(0, 0),)].dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes, as the tensor is stored."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self._part.get_dtype(), 4)

    def __getitem__(self, part: tuple[slice, ...]) -> "torch.Tensor":
        """These rows and columns, which alone are read. Raises WeightsError."""
        try:
            tensor: torch.Tensor = self._part[part]
        except (SafetensorError, OSError) as error:
            raise WeightsError(self._file_name, f"is damaged or unreadable: {error}") from error
        return tensor


def iterate_stored(files: tuple[Path, ...], without: Container[str] = ()) -> Iterator[tuple[str, str, StoredTensor]]:
    """Yield (file name, tensor name, tensor), of which nothing is read before a part of it is asked for.

    without: as of iterate_tensors.

    Raises:
        WeightsError: as iterate_tensors.
    """
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    if name not in without:
                        yield path.name, name, StoredTensor(path.name, file.get_slice(name))
        except (SafetensorError, OSError) as error:
            raise WeightsError(path.name, f"is damaged or unreadable: {error}") from error


class TensorSize(NamedTuple):
    """What a file's header says of one tensor."""

    name: str
    num_elements: int
    num_bytes: int  # as it is stored


def tensor_sizes(files: tuple[Path, ...]) -> Iterator[TensorSize]:
    """The sizes of all tensors, from the files' headers.

    Raises:
        WeightsError: as iterate_tensors.
    """
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    part = file.get_slice(name)
                    num_elements = math.prod(part.get_shape())
                    yield TensorSize(name, num_elements, num_elements * _ITEM_BYTES.get(part.get_dtype(), 4))
        except (SafetensorError, OSError) as error:
            raise WeightsError(path.name, f"is damaged or unreadable: {error}") from error
