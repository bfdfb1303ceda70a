"""How long pipeline schedules leave their ranks idle, and where uneven expert load stretches them.

A schedule is a table: for each rank, what it does, in order. `follow` plays it with the times of a forward pass, of the
gradient of inputs, of that of weights, and of a forward run together with a backward. Messages take no time here.
"""
