"""Cache policies: which keys a call sees, at which positions. See base.CachePolicy for the contract."""

from .base import CachePolicy, PolicySettings, make_policy

__all__ = ["CachePolicy", "PolicySettings", "make_policy"]
