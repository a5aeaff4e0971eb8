"""The vocabulary on a GPU: Numba device functions over inline PTX, and the build of every kernel without a GPU.

`intrinsics` has one line per PTX instruction; `words`, `lanes`, `counts`, `rows` and `reduction` are the operations
by subject; `ops` puts them together; `compile` makes cubins of a plan. Sources: PTX ISA 8.8, by section name.

Context block (`context.py`): int64 words [error record, limit ns, trace buffer, window of rank 0, of rank 1, ...].

Shared memory of a block, all of it dynamic: the notify group's counters from its start (dispatch only, int32), staged
rows from its end downwards, row `index` at size - (index + 1) * (row bytes + 32), its mbarrier behind it. The plan
reserves what both need, so neither has to know the other's size; the size of a launch is a multiple of 128.
"""
