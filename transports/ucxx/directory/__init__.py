"""The directory: which samples exist, where they lie, and who claimed them; functions on a Valkey or Redis server."""

from .directory import Directory
from .encoding.cells import DeadCells, SlotName
from .encoding.operation_ids import OperationId
from .requests.clearing import Cleared
from .requests.hosts import HostInfo
from .requests.publishing import Published, PutHosts
from .server.embedded import EmbeddedServer
from .server.error_table import ERROR_TABLE
from .settings import DirectorySettings

__all__ = [
    "ERROR_TABLE",
    "Cleared",
    "DeadCells",
    "Directory",
    "DirectorySettings",
    "EmbeddedServer",
    "HostInfo",
    "OperationId",
    "Published",
    "PutHosts",
    "SlotName",
]
