"""Complete runs, ready to be started."""
