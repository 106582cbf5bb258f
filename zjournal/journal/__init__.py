"""The journal: facts appended to one SQLite file by one writer, and everything that is derived from them."""
