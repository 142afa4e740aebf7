"""The directory: which samples exist, where they lie, and who claimed them; functions on a Valkey or Redis server."""

from .cells import DeadCells, SlotName
from .clearing import Cleared
from .directory import Directory
from .embedded import EmbeddedServer
from .error_table import ERROR_TABLE
from .hosts import HostInfo
from .operation_ids import Op
from .publishing import Places, Published
from .settings import DirectorySettings

__all__ = [
    "ERROR_TABLE",
    "Cleared",
    "DeadCells",
    "Directory",
    "DirectorySettings",
    "EmbeddedServer",
    "HostInfo",
    "Op",
    "Places",
    "Published",
    "SlotName",
]
