"""The enclave's view of its workers: who they are, who holds which share, sending work, and not believing answers."""

from darknight.fleet.custody import Custody
from darknight.fleet.fleet import Fleet
from darknight.fleet.local import local_fleet
from darknight.fleet.member import Member
from darknight.fleet.remote import connect
from darknight.fleet.seats import Seats

__all__ = ["Custody", "Fleet", "Member", "Seats", "connect", "local_fleet"]
