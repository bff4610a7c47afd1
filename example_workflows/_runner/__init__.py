"""The headless runner: finds or prepares a ComfyUI, runs a workflow on it, saves the result. Standard library only."""
