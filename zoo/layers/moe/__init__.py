"""Mixture-of-experts layers: routers and the mixture."""
