"""Loops over blocks or windows of latent frames. They know the order of model calls, not who answers them."""
