"""Benchmarks: `epmoe bench NAME` measures, with floor and peer of the same run; `epmoe bench table` fills README."""
