"""Overlap: microbatches that hide each other's communication."""

from epmoe.overlap.microbatch import Microbatch, current_microbatch
from epmoe.overlap.scheduler import MinTokens, Whole, concatenate, run_microbatched

__all__ = ["Microbatch", "MinTokens", "Whole", "concatenate", "current_microbatch", "run_microbatched"]
