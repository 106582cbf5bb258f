"""The families of decoders: one file each, from a file's metadata to a `Model`."""
