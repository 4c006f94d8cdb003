"""Overlap: microbatches that hide each other's communication, and the timeline that shows it."""

from epmoe.overlap.microbatch import Microbatch, current_microbatch
from epmoe.overlap.scheduler import MinTokens, Whole, concatenate, run_microbatched
from epmoe.overlap.timeline import Span, Timeline
from epmoe.overlap.trace import trace

__all__ = [
    "Microbatch",
    "MinTokens",
    "Span",
    "Timeline",
    "Whole",
    "concatenate",
    "current_microbatch",
    "run_microbatched",
    "trace",
]
