"""What a test of expert-parallel code needs: ranks in real processes, and memory that shows it was never written."""

from epmoe.testing.interpreter import quicken_interpreter
from epmoe.testing.poison import poison_, poisoned_empty
from epmoe.testing.ranks import RankFailed, RanksTimedOut, run_ranks

__all__ = ["RankFailed", "RanksTimedOut", "poison_", "poisoned_empty", "quicken_interpreter", "run_ranks"]
