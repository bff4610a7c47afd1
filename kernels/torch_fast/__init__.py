"""Runs on every device torch runs on, with bounded score memory."""
