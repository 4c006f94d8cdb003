"""Tuned configurations of the experts' kernels: `store` finds them, `search` measures them (`epmoe tune`)."""
