"""One file per model family, and the scripted model."""
