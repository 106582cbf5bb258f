"""Real coding agents against a live server, outside the usual run: `make clients`."""
