"""What a trace says: a summary of it, why reserved is above allocated in it, and what grew since another one."""

from stalloc.analysis.comparison import Change, Comparison, compare
from stalloc.analysis.explanation import CAUSES, Explanation, OutOfMemory, explain
from stalloc.analysis.holders import MOMENTS, Branch, Growth, Holder, Holders, holders
from stalloc.analysis.moments import Recorded, count_events, recorded
from stalloc.analysis.summary import Summary, summarize

__all__ = [
    "CAUSES",
    "MOMENTS",
    "Branch",
    "Change",
    "Comparison",
    "Explanation",
    "Growth",
    "Holder",
    "Holders",
    "OutOfMemory",
    "Recorded",
    "Summary",
    "compare",
    "count_events",
    "explain",
    "holders",
    "recorded",
    "summarize",
]
