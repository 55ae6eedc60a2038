"""The supervisor: starts the members of a job on this machine, and decides by a policy what the end of one means."""

from lightning_ntp.supervisor.adaptive import Adaptive
from lightning_ntp.supervisor.ends import AllOrNothing, EndPolicy, MemberEnd
from lightning_ntp.supervisor.node import Node
from lightning_ntp.supervisor.processes import Supervisor
from lightning_ntp.supervisor.sites import AgentStore, HostedStore, RemoteStore
from lightning_ntp.supervisor.tolerate import TolerateDeaths

__all__ = [
    "Adaptive",
    "AgentStore",
    "AllOrNothing",
    "EndPolicy",
    "HostedStore",
    "MemberEnd",
    "Node",
    "RemoteStore",
    "Supervisor",
    "TolerateDeaths",
]
