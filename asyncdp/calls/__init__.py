"""The calls that services execute, one class per verb, and the context that is passed along with them.

The slot calls, which only slot-addressable transports and the layers above them need, are in
:mod:`asyncdp.calls.slots`.
"""

from .samples import Budget as Budget
from .samples import Call as Call
from .samples import CallContext as CallContext
from .samples import CheckConsumptionStatus as CheckConsumptionStatus
from .samples import ClaimMeta as ClaimMeta
from .samples import ClearSamples as ClearSamples
from .samples import Clock as Clock
from .samples import Depth as Depth
from .samples import DescribePartition as DescribePartition
from .samples import DropPartition as DropPartition
from .samples import Env as Env
from .samples import EvictSamples as EvictSamples
from .samples import GetSamples as GetSamples
from .samples import Life as Life
from .samples import ListClaims as ListClaims
from .samples import ListHosts as ListHosts
from .samples import ListMetadata as ListMetadata
from .samples import ListPartitions as ListPartitions
from .samples import Only as Only
from .samples import Ping as Ping
from .samples import PopSamples as PopSamples
from .samples import PutSamples as PutSamples
from .samples import RegisterPartition as RegisterPartition
from .samples import ReleaseClaim as ReleaseClaim
from .samples import ReleaseClaims as ReleaseClaims
from .samples import Resend as Resend
from .samples import Sink as Sink
from .samples import WaitPartition as WaitPartition
from .samples import handles as handles

__all__ = [
    "Budget",
    "Call",
    "CallContext",
    "CheckConsumptionStatus",
    "ClaimMeta",
    "ClearSamples",
    "Clock",
    "Depth",
    "DescribePartition",
    "DropPartition",
    "Env",
    "EvictSamples",
    "GetSamples",
    "Life",
    "ListClaims",
    "ListHosts",
    "ListMetadata",
    "ListPartitions",
    "Only",
    "Ping",
    "PopSamples",
    "PutSamples",
    "RegisterPartition",
    "ReleaseClaim",
    "ReleaseClaims",
    "Resend",
    "Sink",
    "WaitPartition",
    "handles",
]
