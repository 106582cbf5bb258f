"""The command line `zj`: main.py and one module per command group; view.py alone knows how a terminal is drawn on."""
