"""``hicache-ray verify``: proves on this machine, for one model, that a hit equals a recompute, whatever tier and layout it comes through.

In one process, without Ray: the production core, executors, pools, engine and storage service. What it found is data
(:mod:`hicache_ray.verify.result`); the rest needs torch and is imported by whoever runs it.
"""
