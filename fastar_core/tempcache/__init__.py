"""TempCache: near-duplicate cached keys are merged over time, so a fixed number of rows remembers everything.

settings.py what can be chosen / features.py what "similar" means / pool.py the groups of one layer / matching.py who joins whom
/ policy.py the cache policy built from them / plan.py bytes known before the first call.
"""
