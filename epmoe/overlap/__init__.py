"""Overlap: microbatches that hide each other's communication."""

from epmoe.overlap.microbatch import Microbatch, current_microbatch
from epmoe.overlap.scheduler import MinTokens, concatenate, run_microbatched

__all__ = ["Microbatch", "MinTokens", "concatenate", "current_microbatch", "run_microbatched"]
