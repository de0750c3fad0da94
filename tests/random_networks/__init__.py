"""Random networks of all families of ops, sharded, beside one process: ``python -m tests.random_networks --count 100``."""
