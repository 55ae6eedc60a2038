"""The supervisor: starts the members of a job on this machine, and decides by a policy what the end of one means."""

from lightning_ntp.supervisor.policies import AllOrNothing, EndPolicy, MemberEnd, TolerateDeaths
from lightning_ntp.supervisor.processes import Supervisor

__all__ = ["AllOrNothing", "EndPolicy", "MemberEnd", "Supervisor", "TolerateDeaths"]
