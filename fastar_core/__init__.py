"""Pure-torch engine of FAST-AR: positions, cache policies, block drivers. Knows no host and no kernel back-end."""
