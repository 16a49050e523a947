"""What a trace says: a summary of it, why reserved is above allocated in it, and what grew since another one."""

from stalloc.analysis.comparison import Change, Comparison, compare
from stalloc.analysis.explanation import CAUSES, Explanation, OutOfMemory, explain
from stalloc.analysis.summary import Summary, summarize

__all__ = ["CAUSES", "Change", "Comparison", "Explanation", "OutOfMemory", "Summary", "compare", "explain", "summarize"]
