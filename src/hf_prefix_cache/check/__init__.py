"""Does a prefix that was computed once give what computing it anew gives, on this model and this device?"""

from .operations import OPERATIONS
from .report import CheckCell, CheckReport
from .run import check

__all__ = ["OPERATIONS", "CheckCell", "CheckReport", "check"]
