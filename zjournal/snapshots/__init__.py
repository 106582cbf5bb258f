"""The snapshots of KV on disk: files, index, what to delete; of the engine, the API and the command line alike."""
