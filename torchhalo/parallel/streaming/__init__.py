"""One device as all ranks in turn: what each rank would do is written down on shapes alone, put in an order, and run.

`trace` writes the program of a shard, `recompute` lets it compute again what it need not keep, `steps` tells what each part of
it needs, `schedule` puts the steps of all shards in an order and says what is moved to the host and back, `overlap` moves that
beside computation, `execute` runs it, `stream` is what a user calls.
"""
