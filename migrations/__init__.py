"""The journal's schema, one step per file, in order; a step is never edited after its release.

The steps are shipped as `zjournal.migrations`. A plain `import migrations` from a checkout would register them a
second time under another name, so it is refused.
"""

from __future__ import annotations

if __name__ != "zjournal.migrations":
    raise ImportError("import zjournal.migrations: the schema steps are part of that package")

from sqlite_utils import Migrations

from zjournal.migrations import m0001_journal

migrations = Migrations("zjournal")
m0001_journal.register(migrations)
