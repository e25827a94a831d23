"""The engine: the same algorithms, fast, over all clients and replications at once.

`layout` cuts a plan into blocks, `draws` makes the random numbers of observations, `federation` makes local steps,
`statistics` feeds the methods. `cost` predicts memory, `machine` is about devices.
Start reading at `tile.run_tile`, then `block.run_block`.
"""
