"""What tests/run.py is made of; standard library only, since it runs before anything is installed."""
