"""Safe reader of torch.distributed.checkpoint's pickled metadata.

Megatron-core describes a checkpoint in a pickle, `.metadata`. Unpickling can call any function by its name. Names are
therefore allowed one by one: modules with metadata classes also have functions that run code.
"""

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_DCP = "torch.distributed.checkpoint"
ALLOWED = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    # megatron-core keeps the plans of all ranks for the next checkpoint, with some settings or versions of PyTorch.
    f"{_DCP}.planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata"},
    "torch": {
        "Size", "bfloat16", "bool", "complex64", "complex128", "float16", "float32", "float64", "float8_e4m3fn",
        "float8_e5m2", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    },
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "builtins": {"bool", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"},
}  # fmt: skip


class UnsafePickle(ValueError):
    """Pickle with a name that checkpoint metadata never has."""


_PyUnpickler: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]


class _Unpickler(_PyUnpickler):
    """Unpickler in Python: the one in C allocates as many bytes as a number in the pickle says (LONG_BINPUT)."""

    # Metadata has no bytearrays, and this opcode allocates as many bytes as its number says.
    dispatch: ClassVar = {code: load for code, load in _PyUnpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}

    def find_class(self, module_name: str, global_name: str) -> type:
        if global_name not in ALLOWED.get(module_name, ()):
            raise UnsafePickle(f"{module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def read_metadata(folder: Path) -> "Metadata":
    """Return the Metadata of the checkpoint in a folder.

    Raises UnsafePickle for a name that is not allowed, and any unpickling error for a damaged file.
    """
    file = folder / ".metadata"
    try:
        with file.open("rb") as stream:
            return _Unpickler(stream).load()
    except UnsafePickle as error:
        raise UnsafePickle(
            f"{file} names {error}, which the metadata of a checkpoint never has: to load it could run code. Do not "
            "use this checkpoint"
        ) from None
