"""The directory: who produced what, where it lies, who claimed it; kept by Valkey or Redis in server-side functions."""

from asyncdp.transports.ucxx.directory.cells import DeadCells, SlotName
from asyncdp.transports.ucxx.directory.clearing import Cleared
from asyncdp.transports.ucxx.directory.directory import Directory
from asyncdp.transports.ucxx.directory.embedded import EmbeddedServer
from asyncdp.transports.ucxx.directory.error_table import ERROR_TABLE
from asyncdp.transports.ucxx.directory.hosts import HostInfo
from asyncdp.transports.ucxx.directory.op import Op
from asyncdp.transports.ucxx.directory.publishing import Places, Published
from asyncdp.transports.ucxx.directory.settings import DirectorySettings

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
