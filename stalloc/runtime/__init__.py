"""Doing it: the arena, the compiled core that hands it out, and the controller that watches, plans and switches."""

from stalloc.runtime.controller import Controller
from stalloc.runtime.process import Runtime, current, needed, start
from stalloc.runtime.runtime_settings import Phase, Settings
from stalloc.runtime.statistics import Report

__all__ = ["Controller", "Phase", "Report", "Runtime", "Settings", "current", "needed", "start"]
