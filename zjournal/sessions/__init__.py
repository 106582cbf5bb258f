"""What can be asked of the journal, for the API and the CLI alike: chains, followers, identities."""
