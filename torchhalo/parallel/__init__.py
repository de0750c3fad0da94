"""Models made ready for sharded inputs: parameters, gradients, checkpoints, arrays in and out, plain tensors.

Knows the ops by what they do, through DTensor. Knows nothing of the tools.
"""
