"""Joints to what surrounds a layer in training: data parallelism and checkpoints. Not imported by `epmoe` itself."""
