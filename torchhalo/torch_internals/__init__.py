"""Where torchhalo meets torch: the only folder that touches torch's private API, one file per subject.

Everything that a torch release may move is imported or called here, and ``tests/torch_internals`` fails loudly when one of them
is gone. Knows nothing of spans, windows, exchanges or ops.
"""
