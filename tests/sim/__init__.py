"""The seeded simulation of the journal's faults: real journal, real SQLite, a disk that fails on order."""
