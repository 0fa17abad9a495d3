"""Load or recompute: which legal length gives the first token soonest.

A model of the machine with few numbers, seeded from the configuration and corrected by what records have really taken:

* prefill: seconds per token, and per token and 1,024 tokens of context before it (attention grows with that);
* each link between tiers: seconds per record and per byte.

A resume at ``k`` tokens costs the loads that it needs and the prefill of the rest. The plan takes the cheapest legal length. Nothing here has
a clock: durations are given.

**The promise.** With a store of stationary speed, however slow, a request is never more than :data:`SLACK` slower than recomputing what the
nearer tiers do not have. What a model believes may be wrong, so it is not all that holds it. A link that has not been measured is tried only
with as many bytes as a *budget* pays for, were the link so slow that nobody had believed it: loads end at a deadline (:attr:`Choice.patience_s`)
that the request's own prefill can absorb, what the load has brought by then is used, and the rest is computed. A link that turned out slow is
tried again only when such a try is due (:data:`AGAIN_S`), under the same bound.
"""
