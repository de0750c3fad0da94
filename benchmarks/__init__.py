"""Measurements of torchhalo beside plain torch and others: ``python -m benchmarks NAME``."""
