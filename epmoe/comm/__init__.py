"""How ranks reach each other: the process group, its deadlines and its errors."""

from epmoe.comm.group import EPGroup, PeerError

__all__ = ["EPGroup", "PeerError"]
