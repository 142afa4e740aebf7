"""The calls that services execute, one class per verb, and the context that is passed along with them.

This is what the author of a layer needs. The slot calls, which only slot-addressable transports and the layers above
them need, are in :mod:`asyncdp.calls.slots`.
"""

from . import context, samples
from .context import *
from .samples import *

__all__: list[str] = []
__all__ += context.__all__
__all__ += samples.__all__
